"""Put rows that recipes wrote with ``--out`` into a file of recipes/results, which holds those of several tables.

    python recipes/publish.py build/attention.csv --table attention --into recipes/results/kernels_h200.csv

The column ``table`` says of which table a row is; cells that a table has no column for are empty. Columns that no page reads are left out.
Earlier rows of the same table and device are replaced; with --add they stay. With --fill all stay but those that say "left out", which
give way to new rows of the same case and device:

    python recipes/publish.py build/large_0.csv build/large_1.csv --fill --into recipes/results/patterns_h200.csv
"""

from pathlib import Path

import pandas as pd
import recipe

from flysurgery.bench.measuring import MEASURED
from flysurgery.bench.rows import check_file
from flysurgery.errors import OptionError

LEFT_OUT = {"iqr_ms", "bytes_moved", "flops", "bound_ms", "device_type", "driver", "flysurgery", "clocks_mhz", "backend", "paper_ratio"}
STAMP = ("date", "device", "threads", "torch", "commit")


def merged(earlier: pd.DataFrame, new: pd.DataFrame, *, add: bool = False) -> pd.DataFrame:
    """Earlier rows and new ones under the columns of both, those of each table one after the other.

    Of the stamp only what earlier rows have is kept.
    """
    left_out = LEFT_OUT | (set(STAMP) - set(earlier) if len(earlier) else set())
    key = [name for name in ("table", "device") if name in new]
    if len(earlier) and not add:
        replaced = set(new[key].itertuples(index=False, name=None))
        earlier = earlier.loc[[row not in replaced for row in earlier.reindex(columns=key).itertuples(index=False, name=None)]]
    rows = pd.concat([earlier, new]).drop(columns=[*left_out], errors="ignore").fillna("")
    if "table" in rows:
        order = {name: place for place, name in enumerate(dict.fromkeys(rows["table"]))}
        rows = rows.sort_values("table", key=lambda names: names.map(order), kind="stable")
    return rows[[*rows.columns.difference(STAMP, sort=False), *(name for name in STAMP if name in rows)]]


def filled(earlier: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Earlier rows, where new ones take the places of those that say "left out". New ones that have no such place are dropped."""
    key = [name for name in earlier if name in new and (name == "device" or name not in (*MEASURED, *STAMP))]
    found = {tuple(row[name] for name in key): row for row in new.fillna("").to_dict("records")}
    rows = earlier.to_dict("records")
    for place, row in enumerate(rows):
        instead = found.get(tuple(row[name] for name in key))
        if instead is not None and row["status"].startswith("left out"):
            rows[place] = {name: instead.get(name, "") for name in row}
    return pd.DataFrame(rows, columns=earlier.columns)


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="FILE", help="what recipes wrote")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE", help="the file of results")
    parser.add_argument("--table", help="the table that the rows are of; without it there is no such column")
    parser.add_argument("--add", action="store_true", help="keep earlier rows of the same table and device")
    parser.add_argument("--fill", action="store_true", help='put rows in the places of earlier ones that say "left out"')
    options = parser.parse_args()
    check_file(options.into, "--into")
    tables = [pd.read_csv(path, dtype=str, keep_default_na=False) for path in options.rows]
    for path, table in zip(options.rows, tables, strict=True):
        if "device" not in table:
            raise OptionError(f"{path} holds no rows of a recipe; name a file that one wrote with --out")
    new = pd.concat(tables)
    if options.table is not None:
        new.insert(0, "table", options.table)
    earlier = pd.read_csv(options.into, dtype=str, keep_default_na=False) if options.into.exists() else pd.DataFrame()
    rows = filled(earlier, new) if options.fill else merged(earlier, new, add=options.add)
    rows.to_csv(options.into, index=False)


if __name__ == "__main__":
    recipe.main(main)
