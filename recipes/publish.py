"""Put rows that recipes wrote with ``--out`` into a file of recipes/results, which holds those of several tables.

    python recipes/publish.py build/attention.csv --table attention --into recipes/results/kernels_h200.csv

The column ``table`` says of which table a row is; cells that a table has no column for are empty. Columns that no page reads are left out.
Earlier rows of the same table and device are replaced; with --add they stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import recipe

from flysurgery.bench import Record
from flysurgery.bench.rows import check_file, read_table, write_records
from flysurgery.errors import OptionError

LEFT_OUT = frozenset(
    {
        *("iqr_ms", "iqr_us", "iqr_joules", "windows", "window_s"),
        *("bytes_moved", "flops", "bound_ms", "bound_us", "config", "device_type", "driver", "flysurgery", "clocks_mhz"),
    }
)


def merged(earlier: Sequence[Record], new: Sequence[Record], *, add: bool = False) -> list[Record]:
    """Earlier rows and new ones under the columns of both, those of each table one after the other."""
    replaced = set() if add else {(row.get("table"), row["device"]) for row in new}
    rows = [row for row in earlier if (row.get("table"), row["device"]) not in replaced] + list(new)
    stamp = [name for name in ("date", "device", "threads", "torch", "commit") if any(name in row for row in rows)]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in {*LEFT_OUT, *stamp}]
    tables = list(dict.fromkeys(row.get("table") for row in rows))
    rows.sort(key=lambda row: tables.index(row.get("table")))
    return [{name: row.get(name, "") for name in (*columns, *stamp)} for row in rows]


def main() -> None:
    """Read, merge and write."""
    parser = recipe.parser_of(__doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="FILE", help="what recipes wrote")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE", help="the file of results")
    parser.add_argument("--table", help="the table that the rows are of; without it there is no such column")
    parser.add_argument("--add", action="store_true", help="keep earlier rows of the same table and device")
    options = parser.parse_args()
    check_file(options.into, "--into")
    tables = [read_table(path) for path in options.rows]
    for path, (columns, _) in zip(options.rows, tables, strict=True):
        if "device" not in columns:
            raise OptionError(f"{path} holds no rows of a recipe; name a file that one wrote with --out")
    head = {} if options.table is None else {"table": options.table}
    new = [head | row for _, rows in tables for row in rows]
    write_records(options.into, merged(read_table(options.into)[1], new, add=options.add))


if __name__ == "__main__":
    recipe.main(main)
