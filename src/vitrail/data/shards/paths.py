"""Which files are meant: tars named one by one, by folder, or by pattern."""

import glob
import re
from pathlib import Path

from vitrail.errors import DataError


def expand(paths: str | tuple[str, ...]) -> tuple[Path, ...]:
    """Tars named one by one, by folder, or by pattern: {000..099}, {a,b}, *, ?, […]."""
    found: list[Path] = []
    for given in (paths,) if isinstance(paths, str) else paths:
        if re.match(r"\w{2,}:", given):
            raise DataError(f"{given} is an address, not a file", "download it first")
        for name in _braces(given):
            path = Path(name)
            if path.is_dir():
                own = sorted(path.glob("*.tar"))
            elif path.exists() or not glob.has_magic(name):
                own = [path]
            else:
                own = sorted(Path(p) for p in glob.glob(name, recursive=True))  # noqa: PTH207 (takes absolute patterns)
            if not own or not own[0].exists():
                raise DataError(f"{name} names no shard", "check the path: it takes tars, folders of them, or patterns")
            found += own
    if not found:
        raise DataError("no shards are named", "give a path, a folder or a pattern")
    return tuple(found)


def _braces(pattern: str) -> list[str]:
    """ "a-{08..10}-{x,y}" → each of its six names, the first brace varying slowest."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        return [pattern]
    low, high, choices = match.groups()
    if choices is None:
        width = max(len(low), len(high)) if low.startswith("0") or high.startswith("0") else 0
        step = 1 if int(low) <= int(high) else -1
        inner = [f"{number:0{width}}" for number in range(int(low), int(high) + step, step)]
    else:
        inner = choices.split(",")
    front, back = pattern[: match.start()], pattern[match.end() :]
    return [rest for middle in inner for rest in _braces(f"{front}{middle}{back}")]
