"""Training steps that wait for no input: work beside them makes them longer."""

import time

import torch

from gdsdata.bench.measure import device

# A step takes some milliseconds, which the report says. Its kernels must take longer than queueing
# them: with a batch of 4096 an H200 waited for a third of each step, and its time moved by 15 %
# with the core's.
WIDTH, BATCH, LAYERS = {"cuda": 2048, "cpu": 128}, {"cuda": 16384, "cpu": 256}, 8
WARM_UP = 20


class TrainingSteps:
    """Forward, backward and AdamW of a multilayer perceptron, made and warmed up here."""

    def __init__(self, device_name):
        kind = torch.device(device_name).type
        width, self.device = WIDTH[kind], device_name
        layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers).to(device_name)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(BATCH[kind], width, device=device_name)
        for _ in range(WARM_UP):
            self.step()

    def step(self):
        """Return its seconds, until the device has done it."""
        started = time.perf_counter()
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        device.wait_for_stream(self.device)
        return time.perf_counter() - started

    def take_while(self, going_on):
        """Return the seconds of each step as long as `going_on()`; of one at least."""
        seconds = [self.step()]
        while going_on():
            seconds.append(self.step())
        return seconds

    def take_for(self, seconds):
        """Return the seconds of each step, one after the other, for so long."""
        ends = time.perf_counter() + seconds
        return self.take_while(lambda: time.perf_counter() < ends)
