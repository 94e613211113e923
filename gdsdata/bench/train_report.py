"""Tables, notes and picture of case=train: a table for each kind of work; bars of step time beside the ceiling's."""

from gdsdata.bench import report
from gdsdata.bench.measure import size_text
from gdsdata.bench.report import number, spread, two_digits
from gdsdata.bench.train_peers import Ceiling

MODELS = {
    "text": "GPT over bytes",
    "volumes": "3-D convolutional net",
    "images": "2-D convolutional net, JPEGs in tars",
}


def percent(name):
    return lambda row: f"{100 * row[name]['median']:.1f}"


def in_ms(name):
    return lambda row: two_digits(row[name] and row[name]["median"] * 1e3)


def each_ms(name):
    return lambda row: two_digits(None if row[name] is None else row[name] * 1e3)


COLUMNS = [
    ("steps/s", lambda row: two_digits(row["steps_per_s"]["median"])),
    ("spread", lambda row: spread(row)),
    ("of ceiling %", lambda row: number(row["ratio_to_limit"] and 100 * row["ratio_to_limit"], "{:.1f}")),
    ("step ms", in_ms("wall_step_s")),
    ("on device ms", in_ms("device_step_s")),
    ("waiting %", percent("waiting_share")),
    ("idle %", percent("idle_share")),
    ("CPU cores", lambda row: two_digits(row["cpu_cores"]["median"])),
    ("saves", lambda row: number(row["saves"] or None)),
    ("stall ms", in_ms("stall_s")),
    ("at least ms", each_ms("least_stall_s")),
    ("cost ms", each_ms("save_cost_s")),
    ("x best peer", lambda row: number(row["ratio_to_best_peer"], "{:.2f}")),
    ("path", lambda row: row["path"]),
]
PICTURE = "Time of a step by row, beside the ceiling's"


def columns_of(case, kind):
    return COLUMNS


def tables(results):
    """[(title, the ceiling's text, rows)] in the order measured."""
    grouped, found = {}, []
    for row in results["rows"]:
        grouped.setdefault((row["data"], row["cache"]), []).append(row)
    for (work, cache), rows in grouped.items():
        about = results["data"][work]
        times = "" if about["repeats"] == 1 else f", body x {about['repeats']:g}"
        title = (
            f"{work}: {MODELS[work]}{times}, {about['batch_size']} x {size_text(about['sample_bytes'])} a step, "
            f"on {results['device']['name']}, {cache} cache"
        )
        found.append((title, ceiling_text(rows), rows))
    return found


def ceiling_text(rows):
    step_s = ceiling_s(rows)
    if step_s is None:
        return f"limit not known: {rows[0]['limit']['name']}"
    return f"ceiling: {two_digits(step_s * 1e3)} ms a step"


def ceiling_s(rows):
    """Seconds of a step that waits for nothing; None where the row is missing or has failed."""
    timed = [row["wall_step_s"] for row in rows if row["key"] == Ceiling.key and row["wall_step_s"]]
    return timed[0]["median"] if timed else None


def notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, in a process of its own: {config['warm_up']} "
        f"steps that do not count, then {config['steps']} (or fewer, where {config['run_seconds']:g} s were over). The "
        "tables show medians. A step is forward, backward (bf16 autocast on a GPU) and AdamW; all rows' models start "
        "alike, and all losses were finite."
    )
    yield (
        "step ms: time of the whole loop by its steps. on device ms: of the steps alone, by events on the device "
        "(on the CPU, by the clock). waiting: share of the loop's time that the host was in next(). idle: share in "
        "which the device had no step: 1 - steps on the device / the loop's time."
    )
    yield (
        "of ceiling: steps/s, of those of the same loop on a batch that stays on the device. Loaders work beside the "
        "steps: where they take cores from them (on the CPU always) steps themselves grow longer, which is no waiting."
    )
    yield (
        "CPU cores: user and system time of the process and its workers in the timed steps, by their time; the loop's "
        "own is in it (see the ceiling's)."
    )
    if config["checkpoint_every"]:
        yield (
            f"Rows that save do so every {config['checkpoint_every']} steps. stall: time on the device between the "
            "step before and what may come next, the median of all runs. at least: the state's bytes by the pace of "
            "a pinned copy from the GPU (on the CPU of a memory copy). cost: what a checkpoint adds to the loop beyond "
            "the same loader's row that saves nothing, its background included: of two medians, so within their noise."
        )
        yield (
            "A checkpoint of each such row was loaded before timing, by torch.load or DCP, and compared bit by bit "
            "with what the state was when it was saved; a step had changed it meanwhile. A first save, untimed, has "
            "made the memory that the next ones use again."
        )
    yield (
        f"Bytes: the first {config['verify_batches']} batches of two epochs of each row were compared with plain "
        "reading (of images, which say their numbers, with torchvision's decoding: within 4 of 255 on average)."
    )
    for row in results["rows"]:
        if row.get("verdict"):
            yield f"{row['data']}, {row['cache']}, {row['name']} says of its loop, warm-up included: {row['verdict']}"
    epochs = [f"{kind} {about['samples'] // about['batch_size']:,}" for kind, about in results["data"].items()]
    yield f"Batches of an epoch: {', '.join(epochs)}. A loader that begins anew with each one does so as often."
    if results["device"]["name"] != "cpu":
        yield "The host is let two steps ahead of the device; CUDA's context was made and used before."


# ------------------------------------------------------------------------------------------------ the picture

WAITED, BAR_INCHES, FRAME_INCHES = "#d9a441", 0.34, 1.35


def plot(results, path):
    """A panel for each table: a bar for each row, its steps on the device and what lay between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(title, [row for row in rows if row["wall_step_s"]]) for title, _, rows in tables(results)]
    drawn = [(title, rows) for title, rows in drawn if rows]
    if not drawn:  # all failed
        return
    heights = [len(rows) * BAR_INCHES + FRAME_INCHES for _, rows in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(10, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, rows) in zip(axes[:, 0], drawn, strict=True):
        panel(axis, title, rows)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def panel(axis, title, rows):
    places = range(len(rows))
    steps = [row["device_step_s"]["median"] * 1e3 for row in rows]
    whole = [row["wall_step_s"]["median"] * 1e3 for row in rows]
    colours = [report.OURS if report.is_ours(row["key"]) else report.OTHERS for row in rows]
    axis.barh(places, steps, color=colours, height=0.7)
    axis.barh(
        places, [max(0.0, all_ - step) for all_, step in zip(whole, steps, strict=True)], left=steps, color=WAITED,
        height=0.7,
    )  # fmt: skip
    largest = 0.0
    for place, row in zip(places, rows, strict=True):
        low, high = (row["wall_step_s"][name] * 1e3 for name in ("min", "max"))
        axis.plot([low, high], [place, place], color="#333333", linewidth=1)
        largest = max(largest, high)
        stall = f", stall {two_digits(row['stall_s']['median'] * 1e3)} ms" if row["stall_s"] else ""
        idle = 100 * row["idle_share"]["median"]
        text = f"{two_digits(row['wall_step_s']['median'] * 1e3)} ms, idle {idle:.1f} %{stall}"
        axis.annotate(
            text, (high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    ceiling = ceiling_s(rows)
    dashed = ""
    if ceiling:
        axis.axvline(ceiling * 1e3, color=report.LIMIT, linestyle="--", linewidth=1.2, zorder=2)
        dashed = "; dashed: the ceiling"
    axis.set_xlim(0, largest * 1.5)
    axis.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
    axis.set_xlabel(f"ms a step: on the device (blue, grey), between steps (yellow){dashed}", fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
