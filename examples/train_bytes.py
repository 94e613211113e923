"""Train a small GPT on the bytes of Python's standard library, stop it anywhere, and resume it.

    python examples/train_bytes.py                # under a minute on 2 cores
    python examples/train_bytes.py --stop-at 120  # saves model, optimizer, RNG and place in the
        data
    python examples/train_bytes.py --resume       # repeats the losses of steps 121 to 300 exactly

It reads top to bottom: data, model, checkpoint, loop. tests/test_examples.py runs this example.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA needs this for equal sums in every run

import torch
from torch import nn
from torch.nn import functional as F

import gdsdata

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="steps in all, those before a resume included")
parser.add_argument("--stop-at", type=int, help="save and stop after this step")
parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
parser.add_argument("--checkpoint", type=Path, default=cache / "train_bytes.pt", help="written at the end")
parser.add_argument("--data", type=Path, default=cache / "train_bytes.bin", help="uint16 tokens; made if missing")
parser.add_argument("--print-every", type=int, default=20, help="steps from one printed loss to the next")
args = parser.parse_args()
if args.resume and not args.checkpoint.exists():
    parser.error(f"--resume: there is no {args.checkpoint}: run it without --resume first")

batch_size, seq_len = 16, 64
width, layers, heads, dropout = 96, 3, 3, 0.05
learning_rate, warmup_steps = 2e-3, 50

# ---------------------------------------------------------------------------------------------------------------- data

if not args.data.exists():
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if "-packages" not in str(path)]
    text = b"".join(path.read_bytes() for path in sources)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    # Atomic: the file appears only when it is complete.
    gdsdata.write_tensor(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.uint16), args.data)

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)

dataset = gdsdata.GDSDataset(
    args.data,
    batch_size=batch_size,
    format=gdsdata.formats.Tokens("uint16", seq_len=seq_len),
    seed=0,
    device=device,
    drop_last=True,
)
print(f"{args.data}: {dataset.samples:,} windows of {seq_len} bytes, {len(dataset):,} batches an epoch")

# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(seq_len, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)  # the first loss is then that of a guess: log(256) = 5.55

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99))

# ---------------------------------------------------------------------------------------------------------- checkpoint

step = 0
if args.resume:
    saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    dataset.load_state_dict(saved["dataset"])  # the next iteration continues after the last batch trained on
    torch.set_rng_state(saved["rng"])
    if device == "cuda":
        torch.cuda.set_rng_state(saved["cuda_rng"])


def save() -> None:
    rng = {"rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state() if device == "cuda" else None}
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dataset": dataset.state_dict()}
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    gdsdata.save({"step": step, **states, **rng}, args.checkpoint)  # durable when it returns; torch.load reads it


# ---------------------------------------------------------------------------------------------------------------- loop

began, first_step = time.monotonic(), step
last_step = min(args.steps, args.stop_at or args.steps)
while step < last_step:
    for batch in dataset:  # one epoch, or the rest of it
        loss = model(batch[:, :-1], batch[:, 1:])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / warmup_steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step == 1 or step % args.print_every == 0 or step == last_step:
            print(f"step {step}: loss {loss.item():.9g}", flush=True)  # 9 digits distinguish any two float32
        if step == last_step:
            save()  # here, where dataset.state_dict() counts this batch as the last one
            break
seconds, stats = time.monotonic() - began, dataset.stats()
print(f"{step - first_step} steps in {seconds:.1f} s, {stats['stall_s']:.3f} s of it waiting for data")
