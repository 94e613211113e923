"""A short search for the best setting of something whose measurements are noisy: what case=tune
does, with no engine.

From the default on, one parameter after the other: all its values and what is best so far take
turns in random order, in rounds; after each round the slower half leaves. A second pass, if the
first one moved, finds values that pay only then. A setting that won many comparisons was lucky in
some. So it is compared with the default once more, in pairs of random order: only if they confirm
it, the default is called worse.
"""

import math
import statistics
import time
from dataclasses import dataclass, field

from gdsdata.bench.cases.tune.settings import LEAST_PAIRS
from gdsdata.bench.measure import intervals

CONFIDENCE = 0.99  # of the gain's interval
LEAST_GAIN = 1.02
PASSES, ROUNDS = 2, 3


class Refused(Exception):
    """A setting that cannot be measured here; its text says why."""


@dataclass
class Tried:
    """One setting in one comparison: `rates` of its rounds, in whatever unit is measured."""

    number: int  # of the comparison
    parameter: str
    options: dict
    rates: list = field(default_factory=list)
    error: str | None = None


class Search:
    """Looks for the options whose `measure(options)` is the largest; {} is the default.

    Args:
        space: {parameter: values to try}.
        measure: options -> a rate (more is better), or raises `Refused`.
        seconds: the search ends after so long, with what is best by then; a measurement that is
            under way ends first.
        generator: random.Random, for the order of turns.
        advance: called with 1 after each measurement.
    """

    def __init__(self, space, measure, seconds, generator, advance=lambda count: None, clock=time.monotonic):
        self.space, self.measure, self.seconds = space, measure, seconds
        self.generator, self.advance, self.clock = generator, advance, clock
        self.tried = []
        self.refused = {}  # why, by options
        self.complete = False

    def run(self):
        """The best options that were found.

        `complete` then says whether every value has been tried in time.
        """
        self.ends = self.clock() + self.seconds
        best: dict = {}
        for _ in range(PASSES):
            before = best
            for parameter, values in self.space.items():
                best = self.best_of(best, parameter, values)
                if self.over():
                    return best
            self.complete = True
            if best == before:
                break
        return best

    def over(self):
        return self.clock() >= self.ends

    def best_of(self, best, parameter, values):
        """`best`, with another value of this parameter if that is clearly better."""
        without = {name: value for name, value in best.items() if name != parameter}
        others = [without, *(without | {parameter: value} for value in values)]
        number = self.tried[-1].number + 1 if self.tried else 0
        incumbent = Tried(number, parameter, best)
        alive = [incumbent, *(Tried(number, parameter, one) for one in others if one != best)]
        self.tried += alive
        for _ in range(ROUNDS):
            for one in self.generator.sample(alive, len(alive)):
                if self.over():  # a comparison that is not whole moves nothing: some had no turn, or one lucky one
                    return best
                self.take_turn(one)
            alive = [one for one in alive if not one.error]
            rest = sorted((one for one in alive if one is not incumbent), key=typical, reverse=True)
            alive = [*([incumbent] if not incumbent.error else []), *rest[: math.ceil(len(rest) / 2)]]
        return self.winner(incumbent, alive)

    def take_turn(self, one):
        key = tuple(sorted(one.options.items()))
        try:
            if key in self.refused:
                raise Refused(self.refused[key])
            one.rates.append(self.measure(one.options))
        except Refused as error:
            one.error = self.refused[key] = str(error)
        self.advance(1)

    def winner(self, incumbent, alive):
        measured = [one for one in alive if one.rates and not one.error]
        found = max(measured, key=typical, default=incumbent)
        if incumbent.rates and not incumbent.error and typical(found) < LEAST_GAIN * typical(incumbent):
            return incumbent.options
        return found.options


def typical(tried):
    return statistics.median(tried.rates)


def said(gain):
    """Return one clause: what was found."""
    if gain["ratio"] is None:
        return "no setting was better: the default is as good"
    times = f"{gain['ratio']:.2f} times the default's rate"
    if gain["low"] is not None:
        times += f" ({gain['low']:.2f} to {gain['high']:.2f}, 99 % interval of {gain['pairs']} pairs)"
    if gain["confirmed"]:
        return times
    return f"the default is as good, as far as can be told: what the search had found came to {times}"


def confirmed(ratios):
    """{"ratio", "low", "high", "pairs", "confirmed"} of the ratios of pairs of turns.

    The interval is Student's, of the logarithms' mean, at `CONFIDENCE`. A slow minute of the disk
    slows both turns of a pair, and is not in their ratio.
    """
    logs = [math.log(ratio) for ratio in ratios]
    interval = intervals.mean_interval(logs, CONFIDENCE)
    ratio = math.exp(statistics.fmean(logs)) if logs else None
    low, high = map(math.exp, interval) if interval else (None, None)
    is_gain = len(ratios) >= LEAST_PAIRS and (low or 0) > 1 and (ratio or 0) >= LEAST_GAIN
    return {"pairs": len(ratios), "ratio": ratio, "low": low, "high": high, "confirmed": is_gain}
