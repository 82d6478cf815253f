"""`vitrail text-tokenizer`: show the tokens of a text, and train a tokenizer."""

import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import TextError
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer

HELD_OUT_EVERY = 10  # every tenth line is held out to measure the tokenizer

app = App(name="text-tokenizer")


@app.command(
    name="show", help_epilogue='Example: vitrail text-tokenizer show "A pane of red glass" --tokenizer out/bpe'
)
def show_tokens(text: str, /, *, tokenizer: Path, chat_template: str | None = None) -> None:
    """Show the tokens of a text with their ids.

    Spaces are shown as ·, line ends as ⏎, and incomplete UTF-8 bytes in hexadecimal.

    Parameters
    ----------
    text
        The text to tokenize.
    tokenizer
        A tokenizer.json, or a folder that contains one.
    chat_template
        Show the text as a user message in this chat template (chatml, llama3, vicuna, …).
    """
    loaded_tokenizer = Tokenizer.load(tokenizer)
    if chat_template is None:
        ids = loaded_tokenizer.encode(text)
    else:
        template, messages = ChatTemplate.from_preset(chat_template), [{"role": "user", "content": text}]
        if added := template.find_missing_tokens(messages, loaded_tokenizer):
            loaded_tokenizer.add_special_tokens(added)
            print(f"special tokens missing in the vocabulary, added for this command: {' '.join(added)}\n")
        text, ids, _ = template.encode(messages, loaded_tokenizer, add_generation_prompt=True)
    print(
        "\n".join(
            format_pieces([(loaded_tokenizer.to_readable(i), str(i)) for i in ids], shutil.get_terminal_size().columns)
        )
    )
    size = len(text.encode())
    print(f"{len(ids)} tokens, {size} bytes" + (f", {size / len(ids):.2f} bytes a token" if ids else ""))


@app.command(
    name="train", help_epilogue="Example: vitrail text-tokenizer train captions.txt --vocab-size 4096 --out out/bpe"
)
def train_tokenizer(
    files: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    vocab_size: int = 4096,
    out: Path,
    special_token: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Train a byte-level BPE tokenizer on text files, and measure it on held-out lines.

    Parameters
    ----------
    files
        Text files in UTF-8.
    vocab_size
        Size of the vocabulary. The bytes and special tokens take the first 257 ids.
    out
        Folder for tokenizer.json and tokenizer_config.json.
    special_token
        An additional special token. May be repeated.
    """
    lines = [line for file in files for line in read_lines(file)]
    if not any(map(str.strip, lines)):
        raise TextError(f"{', '.join(map(str, files))}: there is no text to train on", "give files that are not empty")
    held_out = lines[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    trained_lines = [line for n, line in enumerate(lines, 1) if n % HELD_OUT_EVERY]
    print(f"{len(lines)} lines, of which {len(held_out)} are held out")
    tokenizer = Tokenizer.train(
        trained_lines, vocab_size, special_tokens=("<|endoftext|>", *special_token), progress=sys.stderr.isatty()
    )
    tokenizer.save(out)
    if tokenizer.vocab_size < vocab_size:
        size = tokenizer.vocab_size
        print(f"the vocabulary has {size} tokens, not {vocab_size}: no further pair occurs twice in the text")
    for name, part in (("trained on", trained_lines), ("held out", held_out)):
        size, count = sum(len(line.encode()) for line in part), sum(map(len, tokenizer.encode_batch(part)))
        if count:
            print(f"{name:>10}: {size:,} bytes in {count:,} tokens, {size / count:.2f} bytes a token")
    print(f"{tokenizer.vocab_size} tokens in {out}")


def read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise TextError(f"{file} cannot be read: {error.strerror}", "give an existing text file") from None


def format_pieces(cells: list[tuple[str, str]], width: int) -> list[str]:
    """Format pieces above their ids, separated by rules and wrapped at the width."""
    lines: list[str] = []
    rows, used = ("", ""), 0
    for cell in cells:
        wide = max(map(terminal_width, cell))
        if used and used + wide + 1 > width:
            lines += [*rows, ""]
            rows, used = ("", ""), 0
        rows = tuple(
            row + part + " " * (wide - terminal_width(part)) + "│" for row, part in zip(rows, cell, strict=True)
        )
        used += wide + 1
    return [*lines, *rows, ""] if used else lines


def terminal_width(text: str) -> int:
    """Return the terminal columns of a text: two for wide characters, none for combining marks."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)
