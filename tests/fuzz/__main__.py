"""Fuzz the readers: `python -m fuzz --count 8000 --out out/fuzz image parquet`. Exit code 1 if any file fails."""

import argparse
import sys
from pathlib import Path

from fuzz.runner import format_report, fuzz_format, get_formats, print_line, save_findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Read mutated files of every format.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="default: all")
    parser.add_argument("--count", type=int, default=500, help="mutated files of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder of the files that fail")
    options = parser.parse_args()
    unknown = set(options.formats) - set(get_formats())
    if unknown:
        parser.error(f"unknown format {min(unknown)}; known: {', '.join(get_formats())}")
    files = findings = 0
    for name in options.formats or get_formats():
        report = fuzz_format(name, options.count, options.seed, options.start)
        save_findings(name, report.findings, options.out)
        print_line(format_report(name, report))
        files, findings = files + sum(report.outcomes.values()), findings + len(report.findings)
    print_line(f"{files:,} files, {findings} findings" + (f", saved to {options.out}" if findings else ""))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
