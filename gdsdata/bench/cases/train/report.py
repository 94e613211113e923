"""Tables of case=train, and its picture: bars of step time beside the ceiling's."""

from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import BEST_PEER, PATH, SPREAD, figure, three_digits, whole
from gdsdata.bench.report.layout import Layout

MODELS = {
    "text": "GPT over bytes",
    "volumes": "3-D convolutional net",
    "images": "2-D convolutional net, JPEGs in tars",
}
WAITED = "#d9a441"


def percent(heading, field):
    return figure(heading, field, "{:.1f}".format, 100)


class TrainLayout(Layout):
    columns = (
        figure("steps/s", "steps_per_s"), SPREAD._replace(on_terminal=False), percent("of ceiling %", "ratio_to_limit"),
        figure("step ms", "wall_step_s", scale=1e3),
        figure("on device ms", "device_step_s", scale=1e3, on_terminal=False),
        percent("waiting %", "waiting_share"), figure("next µs", "next_s", scale=1e6), percent("idle %", "idle_share"),
        figure("CPU cores", "cpu_cores"),
        figure("saves", "saves", lambda count: whole(count) if count else "-", on_terminal=False),
        figure("stall ms", "stall_s", scale=1e3), figure("at least ms", "least_stall_s", scale=1e3),
        figure("cost ms", "save_cost_s", scale=1e3), BEST_PEER._replace(on_terminal=False), PATH,
    )  # fmt: skip
    picture_title = "Time of a step by row, beside the ceiling's"
    bar_sizes = {"inches": 0.34, "width": 10, "frame": 1.35}
    grouped_by = ("data", "cache")

    def title(self, rows):
        work, cache = rows[0]["data"], rows[0]["cache"]
        about = self.results["data"][work]
        times = "" if about["repeats"] == 1 else f", body x {about['repeats']:g}"
        step = f"{about['batch_size']} x {size_text(about['sample_bytes'])} a step"
        return f"{work}: {MODELS[work]}{times}, {step}, on {self.device}, {cache} cache"

    def caption(self, rows):
        step_s = ceiling_s(rows)
        if step_s is None:
            return f"limit not known: {rows[0]['limit']['name']}"
        return f"ceiling: {three_digits(step_s * 1e3)} ms a step"

    def drawn(self):
        return picture.tables_with(self, "wall_step_s")

    def bars(self, axis, title, rows):
        """Draw each row's steps on the device, and the time between them."""
        places = range(len(rows))
        steps = [row["device_step_s"]["median"] * 1e3 for row in rows]
        between = [max(0.0, row["wall_step_s"]["median"] * 1e3 - step) for row, step in zip(rows, steps, strict=True)]
        colors = [picture.OURS if is_ours(row["key"]) else picture.OTHERS for row in rows]
        axis.barh(places, steps, color=colors, height=0.7)
        axis.barh(places, between, left=steps, color=WAITED, height=0.7)
        for place, row in zip(places, rows, strict=True):
            low, median, high = (row["wall_step_s"][name] * 1e3 for name in ("min", "median", "max"))
            axis.plot([low, high], [place, place], color=picture.RANGE, linewidth=1)
            stall = f", stall {three_digits(row['stall_s']['median'] * 1e3)} ms" if row["stall_s"] else ""
            idle = 100 * row["idle_share"]["median"]
            picture.beside(axis, f"{three_digits(median)} ms, idle {idle:.1f} %{stall}", high, place)
        ceiling = ceiling_s(rows)
        if ceiling:
            axis.axvline(ceiling * 1e3, color=picture.LIMIT, linestyle="--", linewidth=1.2, zorder=2)
        axis.margins(x=0.5)
        dashed = "; dashed: the ceiling" if ceiling else ""
        label = f"ms a step: on the device (blue, grey), between steps (yellow){dashed}"
        picture.finish_bars(axis, title, [row["name"] for row in rows], label)


def ceiling_s(rows):
    """Seconds of a step that waits for nothing; None if the row is missing or has failed."""
    timed = [row["wall_step_s"] for row in rows if row["key"] == "ceiling" and row["wall_step_s"]]
    return timed[0]["median"] if timed else None
