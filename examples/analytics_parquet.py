"""Group a table in Parquet and in CSV by a column, on the GPU (or the CPU).

    python examples/analytics_parquet.py        # some seconds; makes a table in both forms
    python examples/analytics_parquet.py trips/*.parquet --key zone --value fare
    python examples/analytics_parquet.py trips.csv --key zone --value fare --device cpu

Prints rows, sum, mean and maximum of the values of each key. pyarrow decodes on the processor, and
the two columns go to the GPU as numbers. Only these columns of Parquet files are read; CSV files
are read whole. The result is compared with pyarrow's, which is the better choice without a GPU.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gdsdata

try:
    import pyarrow
    from pyarrow import csv, parquet, types
except ImportError as error:
    raise SystemExit(f"tables are decoded by pyarrow ({error}): pip install 'gdsdata[tables]'") from error

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("files", nargs="*", type=Path, help="*.csv are CSV, others Parquet; all of a kind are one table")
parser.add_argument("--key", default="zone", help="column of whole numbers to group by")
parser.add_argument("--value", default="fare", help="column of numbers")
parser.add_argument("--rows", type=int, default=300_000, help="rows of the table to make")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
names = [args.key, args.value]

# ---------------------------------------------------------------------------------------------------------------- data


def make_table(folder: Path) -> None:
    """Write the same rows in both forms. The folder appears only when it is complete."""
    making, rng = folder.with_name(f"{folder.name}.making-{os.getpid()}"), np.random.default_rng(0)
    making.mkdir(parents=True)
    zones = (250 * rng.random(args.rows) ** 3).astype(np.int32)  # some have many rows, some have few
    columns = {"zone": zones, "fare": rng.gamma(4, 3, args.rows).round(2), "distance": rng.gamma(2, 3, args.rows)}
    table = pyarrow.table({**columns, "note": rng.integers(0, 10**12, args.rows).astype(str)})
    parquet.write_table(table, making / "trips.parquet", compression="zstd", row_group_size=50_000)
    csv.write_csv(table, making / "trips.csv")
    making.rename(folder)


def check(path: Path, schema: pyarrow.Schema) -> None:
    if missing := [name for name in names if name not in schema.names]:
        raise SystemExit(f"{path} has no column {missing[0]!r}: it has {', '.join(schema.names)}")
    for name, fitting in ((args.key, (types.is_integer,)), (args.value, (types.is_integer, types.is_floating))):
        if not any(fits(schema.field(name).type) for fits in fitting):
            wanted = "--key takes whole numbers" if name == args.key else "--value takes numbers"
            raise SystemExit(f"{path}: column {name!r} is of {schema.field(name).type}, and {wanted}")


def columns_of_parquet(paths: list[Path]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the columns on the device, and the number of bytes read."""
    check(paths[0], parquet.read_schema(paths[0]))
    data = gdsdata.GDSDataset(paths, 500_000, gdsdata.formats.Parquet(columns=names), shuffle=False, device=args.device)
    try:
        batches, served = list(data), data.stats()["bytes"]
    except ValueError as error:  # a column has nulls
        raise SystemExit(str(error)) from error
    print("  served by:", {way: moved for way, moved in served.items() if moved})
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}, sum(served.values())


def columns_of_csv(paths: list[Path]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the columns on the device, and the number of bytes read."""
    check(paths[0], csv.open_csv(paths[0]).schema)
    with gdsdata.Engine() as engine:  # reads all files at once; each is parsed as soon as it has been read
        reads = [engine.read(path, torch.empty(path.stat().st_size, dtype=torch.uint8)) for path in paths]
        contents = (pyarrow.BufferReader(pyarrow.py_buffer(read.result().numpy())) for read in reads)
        table = pyarrow.concat_tables([parsed_csv(content) for content in contents])
    if empty := [name for name in names if table[name].null_count]:
        raise SystemExit(f"{paths[0]} and the like: column {empty[0]!r} has empty values: fill them first")
    columns = {name: torch.tensor(table[name].to_numpy(), device=args.device) for name in names}
    return columns, sum(path.stat().st_size for path in paths)


def parsed_csv(source: Any) -> pyarrow.Table:
    return csv.read_csv(source, convert_options=csv.ConvertOptions(include_columns=names))


# ------------------------------------------------------------------------------------------------------------ group by


def grouped(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Aggregate by key: (G,) keys and rows int64, sums float64, maxima as the values."""
    found, group = torch.unique(keys.long(), return_inverse=True)
    sums = torch.zeros(len(found), dtype=torch.float64, device=keys.device).index_add_(0, group, values.double())
    maxima = values.new_empty(len(found)).scatter_reduce_(0, group, values, "amax", include_self=False)
    return {"key": found, "count": torch.bincount(group, minlength=len(found)), "sum": sums, "max": maxima}


def grouped_by_pyarrow(table: pyarrow.Table) -> dict[str, torch.Tensor]:
    wanted = ("count", "sum", "max")
    found = table.group_by(args.key).aggregate([(args.value, what) for what in wanted]).sort_by(args.key)
    of = {"key": found[args.key], **{what: found[f"{args.value}_{what}"] for what in wanted}}
    return {what: torch.tensor(column.to_numpy()) for what, column in of.items()}


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the function's result and seconds, with its work on the GPU."""
    began = time.perf_counter()
    result = function(*arguments)
    if args.device != "cpu":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def answer(kind: str, paths: list[Path], columns_of: Callable, by_pyarrow: Callable) -> None:
    print(f"{kind}: {args.key} and {args.value} of {len(paths)} file(s)")
    (columns, read_bytes), read_s = timed(columns_of, paths)
    if columns[args.value].isnan().any():
        raise SystemExit(f"{paths[0]} and the like: column {args.value!r} has NaNs: fill them first")
    groups, grouped_s = timed(grouped, columns[args.key], columns[args.value])
    theirs, pyarrow_s = timed(lambda: grouped_by_pyarrow(pyarrow.concat_tables(map(by_pyarrow, paths))))
    total = columns[args.value].double().abs().sum().item()
    for what, values in groups.items():  # sums are added in another order, so their last digits differ
        said = dict(rtol=0, atol=1e-12 * total if what == "sum" else 0, check_dtype=False)
        torch.testing.assert_close(values.cpu(), theirs[what], **said, msg=lambda text, what=what: f"{what}: {text}")
    rows, all_bytes = len(columns[args.key]), sum(path.stat().st_size for path in paths)
    print(f"  {rows:,} rows on {args.device} in {read_s:.3f} s, {read_bytes:,} of {all_bytes:,} bytes read")
    print(f"  {len(groups['key'])} groups there in {grouped_s:.3f} s, equal to pyarrow's")
    print(f"  (pyarrow read the cached files and grouped them on the processor in {pyarrow_s:.3f} s)")
    for i in groups["sum"].topk(min(3, len(groups["sum"]))).indices.tolist():
        key, count, total, most = (groups[what][i].item() for what in ("key", "count", "sum", "max"))
        print(f"  {args.key} {key}: {count:,} rows, sum {total:,.2f}, mean {total / count:.4f}, max {most:g}")


folder = cache / f"analytics_parquet-{args.rows}"
if not args.files and not folder.exists():
    make_table(folder)
files = args.files or sorted(folder.iterdir())
csv_files = [path for path in files if path.suffix == ".csv"]
parquet_files = [path for path in files if path not in csv_files]
if parquet_files:
    answer("Parquet", parquet_files, columns_of_parquet, lambda path: parquet.read_table(path, columns=names))
if csv_files:
    answer("CSV", csv_files, columns_of_csv, parsed_csv)
