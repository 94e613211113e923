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
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent / "guide" / "traces"
SHOWN_US = 80_000
RECORD_BYTES, RECORDS, BATCH_SIZE, STEP_S, STEPS = 4096, 65_536, 1024, 0.004, 60
# By the name of a trace: its title, and whether the page cache has the file.
TRACES = {
    "storage": ("Random 4 KiB records, not in the page cache: the loop waits for storage", False),
    "ready": ("The same file in the page cache: batches are ready", True),
}
WAITING, STEP = "gdsdata: waiting for a batch", "step"
COLORS = {WAITING: "#d1495b", STEP: "#8d99ae", "gdsdata: storage": "#e9a03b", "gdsdata: page cache": "#3a7d44"}
LEGEND = {WAITING: "waiting for a batch", STEP: "step", "gdsdata: storage": "storage"} | {
    "gdsdata: page cache": "copying from the page cache"
}
LEFT, RIGHT, TOP, ROW, BAR = 100, 16, 64, 34, 22
WIDTH = 900
FONT = "font-family='system-ui, sans-serif' font-size='14' fill='#222'"


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
        if event.get("ph") != "X" or event["name"] not in COLORS:
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
    height = TOP + ROW * len(rows) + 40
    scale = (WIDTH - LEFT - RIGHT) / SHOWN_US
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{height}' rx='6' fill='#fff'/>",
        f"<text x='16' y='24' {FONT} font-weight='600'>{escape(title)}</text>",
    ]
    at = 16
    for name, text in LEGEND.items():
        parts.append(f"<rect x='{at}' y='38' width='12' height='12' fill='{COLORS[name]}'/>")
        parts.append(f"<text x='{at + 18}' y='49' {FONT}>{text}</text>")
        at += 40 + 8 * len(text)
    for number, (row, spans) in enumerate(rows.items()):
        y = TOP + ROW * number
        parts.append(f"<text x='16' y='{y + 16}' {FONT}>{escape(row)}</text>")
        parts.append(f"<rect x='{LEFT}' y='{y}' width='{WIDTH - LEFT - RIGHT}' height='{BAR}' fill='#f1f2f4'/>")
        for name, begin, duration in spans:
            x, width = LEFT + begin * scale, max(duration * scale, 0.4)
            parts.append(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{BAR}' fill='{COLORS[name]}'/>")
    y = TOP + ROW * len(rows)
    for ms in range(0, SHOWN_US // 1000 + 1, 10):
        x = LEFT + ms * 1000 * scale
        parts.append(f"<line x1='{x:.1f}' y1='{y - 8}' x2='{x:.1f}' y2='{y - 2}' stroke='#888'/>")
        parts.append(f"<text x='{x:.1f}' y='{y + 16}' {FONT} text-anchor='middle'>{ms}</text>")
    parts.append(f"<text x='16' y='{y + 16}' {FONT}>ms</text></svg>")
    return "\n".join(parts) + "\n"


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
