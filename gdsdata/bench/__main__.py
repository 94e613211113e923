import os
import signal
import sys
from pathlib import Path

from gdsdata.bench import cases, extra, hints, settings
from gdsdata.bench.harness.process import INTERRUPTED, leave_out_later_interrupts


def register():
    """Register the schemas of the files under configs/, and the text of --help."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="settings", node=settings.Settings)
    for name, cls in cases.SETTINGS.items():
        store.store(group="case", name=f"{name}_settings", node=cls)
    store.store(group="data", name="data_settings", node=settings.DataSettings)
    store.store(group="engine", name="engine_options", node=settings.engine_schema())
    store.store(group="device", name="device_settings", node=settings.DeviceSettings)
    help_node = {"app_name": "gdsdata.bench", "header": "", "footer": "", "template": settings.help_text()}
    store.store(group="hydra/help", name="gdsdata_bench", node=help_node)


def measure(config):
    from hydra.core.hydra_config import HydraConfig

    from gdsdata.bench import output, run

    of_hydra = HydraConfig.get()
    folder = Path(of_hydra.runtime.output_dir)
    with output.removed_if_nothing_was_measured(folder, of_hydra.output_subdir):
        try:
            checked = settings.settings_from(config)
            status = run.main(checked, folder)
        except (ValueError, OSError) as error:
            print(f"gdsdata.bench: {error}", file=sys.stderr)
            status = 2
    if status == INTERRUPTED:
        interrupted()
    sys.exit(status)


def interrupted():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's finalization would report another one.
    print("gdsdata.bench: interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def main():
    if lack := extra.lack():
        print(f"gdsdata.bench: {lack}", file=sys.stderr)
        sys.exit(2)
    import hydra

    try:
        folder = settings.configs_folder()
    except FileNotFoundError as error:
        sys.exit(f"gdsdata.bench: {error}")
    if sys.stdout is None:  # it is closed; the report is in the run's folder too
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    register()
    leave_out_later_interrupts()
    try:
        hydra.main(version_base="1.3", config_path=str(folder), config_name="config")(measure)()
    except KeyboardInterrupt:
        interrupted()
    except SystemExit as ended:
        if ended.code == 1:  # Hydra's, if it refuses a setting
            for hint in hints.hints(sys.argv[1:]):
                print(f"gdsdata.bench: {hint}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
