"""Fine-tune a language model of transformers whose weights gdsdata reads and writes.

    python examples/integrations/transformers_llm.py          # a tiny Llama on the CPU, in seconds
    python examples/integrations/transformers_llm.py --model /mnt/nvme/llama --device cuda
    python examples/integrations/transformers_llm.py --model s3://bucket/llama --device cuda

The model is loaded, trained on the bytes of this file for a few steps, saved, and loaded again.
Each load is compared with one of transformers alone, if the model is in a folder. Needs
`pip install transformers`. tests/test_transformers.py runs this example.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gdsdata.integrations.transformers import from_pretrained, hooks, save_pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder, a URL or a name; default: a tiny Llama is made")
parser.add_argument("--device", default="cpu", help="where the model is loaded and trained")
parser.add_argument("--steps", type=int, default=5, help="of the training")
parser.add_argument("--out", type=Path, help="the folder for the trained model; default: a temporary one")


def make_tiny_llama(folder: Path) -> str:
    """Write a model of 0.4 million parameters, in two shards, and return its folder."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    save_pretrained(LlamaForCausalLM(config), folder, max_shard_size="1MB")
    return str(folder)


def size_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def timed(name: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    began = time.perf_counter()
    model = load()
    took = time.perf_counter() - began
    print(f"{name}: {size_bytes(model) / 1e6:.1f} MB in {took:.2f} s ({size_bytes(model) / 1e9 / took:.2f} GB/s)")
    return model


def train(model: torch.nn.Module, device: str, steps: int) -> None:
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        ids = text[step * 256 : (step + 4) * 256].view(4, 256)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or make_tiny_llama(Path(folder, "tiny"))
        out = options.out or Path(folder, "trained")
        how = {"dtype": "auto", "device_map": options.device}

        model = timed("by gdsdata", lambda: from_pretrained(AutoModelForCausalLM, path, **how))
        if os.path.isdir(path):
            stock = timed("by transformers", lambda: AutoModelForCausalLM.from_pretrained(path, **how))
            same = all(torch.equal(*pair) for pair in zip(model.parameters(), stock.parameters(), strict=True))
            print(f"the same parameters: {same}")
            del stock

        train(model, options.device, options.steps)

        save_pretrained(model, out)  # all files are on storage when this returns
        print(f"saved: {', '.join(sorted(os.listdir(out)))}")
        with hooks():  # the stock call, on the engine
            again = AutoModelForCausalLM.from_pretrained(out, **how)
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
        print(f"read back as it was trained: {same}")


if __name__ == "__main__":
    main()
