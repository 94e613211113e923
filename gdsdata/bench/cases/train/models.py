"""The models of case=train: a GPT, convolutional nets over volumes and images.

A batch is one tensor as its loader gives it, and all of it is used. A net's target follows from the
batch itself, so there are no labels. A step goes through a body of layers `repeats` times, whole or
in part, with the same weights. So steps grow longer, and a checkpoint's state does not.
"""

import contextlib
import itertools
import math
import statistics

import torch
from torch import nn
from torch.nn import functional

from gdsdata.bench.measure import device

# On a GPU wide enough that its kernels take longer than giving it their work: else the host would
# set a step's time (docs/design-decisions.md).
WIDTH = {"text": {"cuda": 512, "cpu": 32}, "volumes": {"cuda": 256, "cpu": 16}, "images": {"cuda": 256, "cpu": 16}}
CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}  # by dimensions
LAYERS = {"text": 4, "volumes": 1, "images": 2}
# Voxels or pixels that the first convolution makes one of, in each direction.
PATCH = {"volumes": {"cuda": 4, "cpu": 8}, "images": {"cuda": 8, "cpu": 8}}
LEAST_SIDE = 8
HIDDEN = {"cuda": 4096, "cpu": 64}  # of a head that has most of the weights: checkpoints are of some size
HEAD_WIDTH, BYTES = 32, 256
LEARNING_RATE = 3e-4
CALIBRATED = 5  # steps that are timed for their median, behind
UNTIMED = 2  # of which the device gets each part when the host has it
MOST_REPEATS = 10_000
ROUNDED = 0.05  # layers that a step may lack


def through(body, x, repeats):
    """Applies the layers of `body` to `x` in turn, `repeats` times as many as there are."""
    for layer in itertools.islice(itertools.cycle(body), round(repeats * len(body))):
        x = layer(x)
    return x


class Attention(nn.Module):
    """A transformer's layer: causal attention and two linear ones, behind norms."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.projections(self.norms[0](x)).view(batch, length, 3, self.heads, HEAD_WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.norms[1](x))


class Gpt(nn.Module):
    """The next byte of windows of bytes, (B, length + 1) of whole numbers."""

    def __init__(self, sample_shape, width, layers):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(sample_shape[0] - 1, width)
        self.body = nn.Sequential(*(Attention(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, batch, repeats):
        tokens = batch.long()
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        x = through(self.body, x, repeats)
        said = self.head(x)
        return functional.cross_entropy(said.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, width, dimensions):
        super().__init__()
        convolution = CONVOLUTIONS[dimensions](width, width, 3, padding=1)
        self.layers = nn.Sequential(nn.GroupNorm(4, width), nn.GELU(), convolution)

    def forward(self, x):
        return x + self.layers(x)


class Net(nn.Module):
    """Mean and deviation by channel of volumes (B, D, H, W), images (B, 3, H, W)."""

    def __init__(self, width, layers, dimensions, patch, hidden):
        super().__init__()
        channels = {2: 3, 3: 1}[dimensions]
        self.channels, self.dimensions = channels, dimensions
        self.patches = CONVOLUTIONS[dimensions](channels, width, patch, stride=patch)
        self.body = nn.Sequential(*(Residual(width, dimensions) for _ in range(layers)))
        self.head = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 2 * channels)
        )

    def forward(self, batch, repeats):
        x = batch.float() if batch.is_floating_point() else batch.float() / 255
        x = x.reshape(len(x), self.channels, *x.shape[-self.dimensions :])
        with torch.no_grad():
            values = x.flatten(2)
            wanted = torch.cat([values.mean(2), values.std(2)], 1)
        x = self.patches(x)
        x = through(self.body, x, repeats)
        return functional.mse_loss(self.head(x.flatten(2).mean(2)).float(), wanted)


def model_for(work, sample_shape, device_name):
    kind = torch.device(device_name).type
    width, layers = WIDTH[work][kind], LAYERS[work]
    if work == "text":
        return Gpt(sample_shape, width, layers)
    return Net(width, layers, {"images": 2, "volumes": 3}[work], PATCH[work][kind], HIDDEN[kind])


def check_shape(work, sample_shape):
    """Raises ValueError for samples that the work's net cannot take."""
    if work == "volumes" and (len(sample_shape) != 3 or min(sample_shape) < LEAST_SIDE):
        raise ValueError(
            f"data.shape={list(sample_shape)}: case=train takes volumes of three sides, of {LEAST_SIDE} voxels or more"
        )


class Training:
    """A model, AdamW, and one step of both: forward, backward (bf16 autocast on a GPU), optimizer.

    Args:
        work: text, volumes or images.
        sample_shape: of one sample, as in a batch (B, *sample_shape).
        repeats: how often the body is gone through, a multiple of one layer's share of it.
        seed: of the weights; `state_dict`s of equal seeds are equal.
    """

    def __init__(self, work, sample_shape, device_name, repeats=1, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = model_for(work, sample_shape, device_name)
        self.device, self.repeats = device_name, repeats
        self.on_gpu = device.is_cuda(device_name)
        if self.on_gpu:
            self.model.to(device_name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=self.on_gpu)

    def step(self, batch):
        """The loss: a tensor on the device, for which nobody has waited."""
        with torch.autocast("cuda", torch.bfloat16) if self.on_gpu else contextlib.nullcontext():
            loss = self.model(batch, self.repeats)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self):
        """{name: tensor} of model and optimizer, as they are: not copied."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{slot}"] = value
        return found

    def step_s(self, batch):
        """The median of some steps' seconds: as in a loop, nobody waits between them."""
        ends = []
        for _ in range(UNTIMED + 1 + CALIBRATED):
            self.step(batch)
            ends.append(device.mark(self.device))
        device.synchronize(self.device)
        return statistics.median(itertools.starmap(device.seconds_between, itertools.pairwise(ends[UNTIMED:])))

    def repeats_for(self, batch, wanted_s):
        """How often to go through the body, at least once, for steps of `wanted_s`.

        It follows from what steps of one and of more repeats take.
        """
        self.repeats = 1
        self.step_s(batch)  # the first ones choose kernels and take memory
        once = longer = self.step_s(batch)
        while self.repeats == 1 or longer < wanted_s and self.repeats < MOST_REPEATS:
            self.repeats = min(2 * self.repeats, MOST_REPEATS)
            longer = self.step_s(batch)
        each = (longer - once) / (self.repeats - 1)
        layers = len(self.model.body)
        more_layers = math.ceil((wanted_s - once) / each * layers - ROUNDED) if each > 0 else 0
        return max(1, min(MOST_REPEATS, 1 + more_layers / layers))
