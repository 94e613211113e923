"""Draw the traces of docs/guide/waiting.md as SVG.

    python docs/draw_traces.py            # draw the kept traces again
    python docs/draw_traces.py --record   # run the loops of TRACES, and draw their traces

A kept trace (docs/guide/traces/NAME.json) is a part of one that `gdsdata.profile` wrote: the spans
of 80 ms in the middle of the run, with their times in microseconds.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

import svg

FOLDER = Path(__file__).resolve().parent / "guide" / "traces"
SHOWN_US = 80_000
RECORD_BYTES, RECORDS, BATCH_SIZE, STEP_S, STEPS = 4096, 65_536, 1024, 0.004, 60
# By the name of a trace: its title, and whether the page cache has the file.
TRACES = {
    "storage": ("Random 4 KiB records, not in the page cache: the loop waits for storage", False),
    "ready": ("The same file in the page cache: batches are ready", True),
}
WAITING, STEP = "gdsdata: waiting for a batch", "step"
SPANS = {  # by their names in a trace: the class of their color, and what the legend says
    WAITING: ("waiting", "waiting for a batch"),
    STEP: ("other", "step"),
    "gdsdata: storage": ("storage", "storage"),
    "gdsdata: page cache": ("accent", "copying from the page cache"),
}
MORE_STYLE = ".drawn .waiting{fill:#d1495b}.drawn .storage{fill:#e08e2b}"
LEFT, TOP, ROW, BAR = 66, 54, 32, 20  # of the first row, and of each one


def record(name):
    """Run a loop under the profiler, and keep the middle of its trace."""
    from torch.profiler import ProfilerActivity, record_function

    import gdsdata

    _, is_cached = TRACES[name]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder, "records")
        path.write_bytes(os.urandom(RECORD_BYTES) * RECORDS)
        with path.open("rb") as file:
            os.fsync(file)
            if not is_cached:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        format = gdsdata.formats.Records("u1", (RECORD_BYTES,))
        ds = gdsdata.GDSDataset(path, BATCH_SIZE, format, device="cpu", on_break="restart")
        with gdsdata.profile(activities=[ProfilerActivity.CPU]) as profile:
            for step, _ in enumerate(ds):
                with record_function(STEP):
                    time.sleep(STEP_S)  # a step on a GPU: this thread has nothing to do
                if step == STEPS:
                    break
        print(f"{name}: {ds.report()}")
        profile.export_chrome_trace(str(Path(folder, "trace.json")))
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(middle(events), indent=0) + "\n")


def middle(events):
    """Return rows of spans: {row: [[name, begin, duration], ...]} from the run's middle on."""
    steps = [event for event in events if event.get("name") == STEP and event.get("ph") == "X"]
    begin = steps[len(steps) // 3]["ts"]
    rows = {"the loop": []}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        if event.get("ph") != "X" or event["name"] not in SPANS:
            continue
        first, last = max(event["ts"], begin), min(event["ts"] + event["dur"], begin + SHOWN_US)
        if first < last:
            row = short(names[event["tid"]]) if event.get("cat") == "gdsdata" else "the loop"
            rows.setdefault(row, []).append([event["name"], round(first - begin, 1), round(last - first, 1)])
    return {row: sorted(spans, key=lambda span: span[1]) for row, spans in rows.items()}


def short(thread):
    """Return "worker 0" for "gdsdata worker 0 (cpu)"."""
    return re.sub(r"^gdsdata | \(.*", "", thread)


def drawing(title, rows):
    """Return the SVG of a trace: a row for the loop and for each of the engine's threads."""
    scale = (svg.WIDTH - LEFT - 4) / SHOWN_US
    parts = []
    for number, (color, words) in enumerate(SPANS.values()):
        x, y = (0, 170)[number % 2], 4 + 20 * (number // 2)
        parts += [svg.box(x, y, 11, 11, color), svg.text(x + 17, y + 10, words)]
    for number, (row, spans) in enumerate(rows.items()):
        y = TOP + ROW * number
        parts += [svg.text(0, y + 15, row), svg.box(LEFT, y, svg.WIDTH - LEFT - 4, BAR, "soft", 0)]
        for name, begin, duration in spans:
            x, width = LEFT + begin * scale, max(duration * scale, 0.3)
            parts.append(svg.box(round(x, 1), y, round(width, 2), BAR, SPANS[name][0], 0))
    y = TOP + ROW * len(rows)
    parts.append(svg.text(0, y + 12, "ms", "muted"))
    for ms in range(0, SHOWN_US // 1000 + 1, 20):
        anchor = "end" if ms == SHOWN_US // 1000 else "middle"
        parts.append(svg.text(round(LEFT + 1000 * ms * scale, 1), y + 12, str(ms), "muted", anchor=anchor))
    return svg.picture(y + 20, parts, title, MORE_STYLE)


def draw(name):
    rows = json.loads((FOLDER / f"{name}.json").read_text())
    return drawing(TRACES[name][0], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the loops, and replace the kept traces")
    if parser.parse_args().record:
        for name in TRACES:
            record(name)
    for name in TRACES:
        (FOLDER / f"{name}.svg").write_text(draw(name))
