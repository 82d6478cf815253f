"""Expands the paths and URLs of shards: tar files, folders and patterns."""

import glob
import re
from pathlib import Path

from vitrail.data.shards.shard_file import RemoteFile, ShardFile, is_remote, open_file_system
from vitrail.errors import DataError


def expand_shards(paths: str | tuple[str, ...]) -> tuple[ShardFile, ...]:
    """Expand paths and URLs to shards. Accepts files, folders, and patterns with {000..099}, {a,b}, *, ? and […]."""
    expanded: list[ShardFile] = []
    for pattern in (paths,) if isinstance(paths, str) else paths:
        if is_remote(pattern):
            for url in _expand_braces(pattern):
                expanded += _expand_url(url)
        else:
            expanded += expand_paths(pattern)
    if not expanded:
        raise DataError("no shards are given", "give a path, a folder, a pattern or a URL")
    return tuple(expanded)


def _expand_url(url: str) -> list[RemoteFile]:
    """Expand a URL of a shard, a folder or a pattern. A shard is not looked up: it is opened later."""
    if url.partition("?")[0].endswith(".tar") and not glob.has_magic(url.partition("?")[0]):
        return [RemoteFile(url)]
    fs, path = open_file_system(url)
    try:
        matches = sorted(fs.glob(path if glob.has_magic(path) else f"{path.rstrip('/')}/*.tar"))
    except Exception as error:  # every file system has errors of its own
        raise DataError(f"{url} cannot be listed: {error!s:.200}", "name its shards: …-{000..099}.tar") from error
    if not matches:
        raise DataError(f"{url} matches no shard", "give the URL of a tar file, a folder of them, or a pattern")
    return [RemoteFile(fs.unstrip_protocol(match)) for match in matches]


def is_shards(name: str) -> bool:
    """Whether a path, a pattern or a URL names shards: tar files, or a folder of them."""
    if is_remote(name) or name.endswith(".tar"):
        return True
    path = Path(name)
    return path.is_dir() and next(path.glob("*.tar"), None) is not None


def expand_paths(paths: str | tuple[str, ...]) -> tuple[Path, ...]:
    """Expand paths to local tar files, like `expand_shards`."""
    expanded: list[Path] = []
    for pattern in (paths,) if isinstance(paths, str) else paths:
        if re.match(r"\w{2,}:", pattern):
            raise DataError(f"{pattern} is a URL, not a file", "download it first")
        for name in _expand_braces(pattern):
            path = Path(name)
            if path.is_dir():
                matches = sorted(path.glob("*.tar"))
            elif path.exists() or not glob.has_magic(name):
                matches = [path]
            else:
                matches = sorted(Path(p) for p in glob.glob(name, recursive=True))  # noqa: PTH207 (absolute patterns)
            if not matches or not matches[0].exists():
                raise DataError(f"{name} matches no shard", "give a tar file, a folder of them, or a pattern")
            expanded += matches
    if not expanded:
        raise DataError("no shards are given", "give a path, a folder or a pattern")
    return tuple(expanded)


def _expand_braces(pattern: str) -> list[str]:
    """Expand "a-{08..10}-{x,y}" to its six names; the first brace varies slowest."""
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
    return [rest for middle in inner for rest in _expand_braces(f"{front}{middle}{back}")]
