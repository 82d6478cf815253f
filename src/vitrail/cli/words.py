"""`vitrail words`: how a text is cut into tokens, and a small vocabulary of one's own."""

import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import TextError
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer

HELD_OUT = 10  # every tenth line measures the vocabulary and does not train it

app = App(
    name="words",
    help="Show how a text is cut into tokens; train a vocabulary.",
    help_epilogue='Example: vitrail words "Two red cubes" --tokenizer out/words',
)


@app.default
def show(text: str, /, *, tokenizer: Path, chat: str | None = None) -> None:
    """Show the tokens of a text with their ids.

    Spaces are shown as ·, line ends as ⏎, and bytes that make no character by themselves in hexadecimal.

    Parameters
    ----------
    text
        What to cut.
    tokenizer
        A tokenizer.json, or a folder that holds one.
    chat
        Show the text as a user's turn under this chat preset (chatml, llama3, vicuna …).
    """
    words = Tokenizer.load(tokenizer)
    if chat is None:
        ids = words.encode(text)
    else:
        template, messages = ChatTemplate.preset(chat), [{"role": "user", "content": text}]
        if added := template.missing(messages, words):
            words.add_specials(added)
            print(f"not in the vocabulary, added for this view: {' '.join(added)}\n")
        text, ids, _ = template.encode(messages, words, generate=True)
    print("\n".join(ruled([(words.piece(i), str(i)) for i in ids], shutil.get_terminal_size().columns)))
    size = len(text.encode())
    print(f"{len(ids)} tokens, {size} bytes" + (f", {size / len(ids):.2f} bytes a token" if ids else ""))


@app.command(help_epilogue="Example: vitrail words train captions.txt --vocab 4096 --out out/words")
def train(
    files: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    vocab: int = 4096,
    out: Path,
    special: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Train a byte-level BPE on text files and measure it on lines it has not seen.

    Parameters
    ----------
    files
        Text files in UTF-8.
    vocab
        Tokens in all; the bytes and special tokens take the first 257.
    out
        Folder for tokenizer.json and tokenizer_config.json.
    special
        A further special token; may be given several times.
    """
    lines = [line for file in files for line in read_lines(file)]
    if not any(map(str.strip, lines)):
        raise TextError(f"{', '.join(map(str, files))}: no text to train on", "give files that are not empty")
    held_out = lines[HELD_OUT - 1 :: HELD_OUT]
    seen = [line for n, line in enumerate(lines, 1) if n % HELD_OUT]
    print(f"{len(lines)} lines, {len(held_out)} of them held out")
    words = Tokenizer.train(seen, vocab, specials=("<|endoftext|>", *special), progress=sys.stderr.isatty())
    words.save(out)
    if words.size < vocab:
        print(f"the text gave {words.size} tokens, not {vocab}: it has no more pairs that come twice")
    for name, part in (("trained on", seen), ("held out", held_out)):
        size, count = sum(len(line.encode()) for line in part), sum(map(len, words.encode_batch(part)))
        if count:
            print(f"{name:>10}: {size:,} bytes in {count:,} tokens, {size / count:.2f} bytes a token")
    print(f"{words.size} tokens in {out}")


def read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise TextError(f"{file} cannot be read: {error.strerror}", "give text files that exist") from None


def ruled(cells: list[tuple[str, str]], width: int) -> list[str]:
    """Lines of pieces over their ids, cut at the width, a rule between neighbours."""
    lines: list[str] = []
    rows, used = ("", ""), 0
    for cell in cells:
        wide = max(map(columns, cell))
        if used and used + wide + 1 > width:
            lines += [*rows, ""]
            rows, used = ("", ""), 0
        rows = tuple(row + part + " " * (wide - columns(part)) + "│" for row, part in zip(rows, cell, strict=True))
        used += wide + 1
    return [*lines, *rows, ""] if used else lines


def columns(text: str) -> int:
    """Columns a terminal takes for a text: wide characters two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)
