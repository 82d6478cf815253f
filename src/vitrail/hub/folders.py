"""Models in folders: our own format, and Hugging Face's in both directions."""

import copy
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.codecs.quantizers import FSQ, Quantizer
from vitrail.config import Config
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import pictures, speaking
from vitrail.hub.based import WORDS, Base, apart, base_of, joined, refuse_itself
from vitrail.hub.configs import OWN, Found, find, layers, resolve
from vitrail.hub.families import FAMILIES, MODELS
from vitrail.hub.family import Family
from vitrail.hub.files import Weights, write_json, write_weights
from vitrail.hub.maps import Move, under
from vitrail.hub.rows8 import packed, unpacked
from vitrail.hub.single import Single, single_tokenizer
from vitrail.nn import Rotary
from vitrail.processing.sidecar import read_sidecar
from vitrail.processing.text import Tokenizer


def load(name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """A model from a folder of ours or of Hugging Face's, from a hub id, from one file (GGUF, llama2.c), or by the name
    of a package that holds one (`stories15M`, `smollm2-135m`), or of one that ships with this one (`judge`).

    Weights keep the type they are stored in unless `dtype` is given; quantised ones become float32.
    """
    return build(find(resolve(name_or_path)), dtype, device)


def save(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    small: bool = False,
    base: str | None = None,
) -> None:
    """Write a model that `load` reads: vitrail.json (its kind and config) and safetensors. `small` keeps 8 bits a
    weight, with a scale a row. Of a decoder that came from `base`, a model by name or folder, only the difference is
    kept, and the base must be there when this is loaded (see `hub.based`). How pictures are prepared is written too
    where the model came with another way than ours (see `hub.pictures`), and what came with a vision-language model
    for transformers' processor (see `hub.speaking`)."""
    kind = next((kind for kind, (_, cls) in MODELS.items() if type(model) is cls), None)
    if kind is None:
        raise CheckpointError(f"{type(model).__name__} is not a kind that can be saved", f"known: {', '.join(MODELS)}")
    folder, config = Path(folder), cast(Config, model.config)
    tensors: Iterable[tuple[str, Tensor]] = model.state_dict().items()
    about = {"kind": kind, "vitrail": __version__, "config": config.plain()}
    if base is not None:
        refuse_itself(folder, base)
        stands = Base.of(base)
        tensors, about["base"] = apart(tensors, stands.tensors(load)), stands.plain()
    write_weights(folder, packed(tensors) if small else tensors)
    write_json(folder / OWN, about)
    pictures.keep(model, folder)
    speaking.keep(model, folder, tokenizer)
    if tokenizer is not None and base is not None and _spells_alike(folder, base):
        (folder / WORDS).unlink()


def from_hf(path_or_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """A model from a Hugging Face folder or hub id."""
    return build(find(resolve(path_or_id), own=False), dtype, device)


def tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer that belongs to what `load` loads."""
    path = resolve(name_or_path)
    found = single_tokenizer(path) if path.is_file() else None
    if found is not None or not (path / OWN).is_file() or (path / WORDS).is_file():
        return Tokenizer.load(path) if found is None else found
    if (base := base_of(path)) is None:
        return Tokenizer.load(path)
    base.check_words()
    words = copy.copy(tokenizer(base.start))  # its words, by our names for them, and our way of asking
    words.named, words.chat_template, stops = read_sidecar(path)
    words.stops = tuple(dict.fromkeys([*([] if words.eos is None else [words.eos]), *stops]))
    return words


def _spells_alike(folder: Path, base: str) -> bool:
    """Whether a folder's words are those of the model it stands on."""
    try:
        theirs = tokenizer(base)
    except VitrailError:  # it has none
        return False
    with TemporaryDirectory() as other:
        theirs.save(other)
        return (Path(other) / WORDS).read_bytes() == (folder / WORDS).read_bytes()


def family_of(model: type[nn.Module], config: Any, family: str | None = None) -> Family:
    """The family that such a model is written as: the first that it fits, unless named."""
    left = {
        "place": ("adds learned places to its tower's features", ", or train it without"),
        "reduce": ("leaves out tokens of a picture", ", or write model.reduced(None)"),
        "voco": ("has tokens stand for a picture", ""),
    }
    for key, (what, more) in left.items():
        if getattr(config, key, None):
            raise CheckpointError(
                f"no Hugging Face family {what} (model.config.{key})", f"keep it in our format (hub.save){more}"
            )
    rows = {name: row for name, row in FAMILIES.items() if row.model is model and row.fits(config)}
    if family is not None and family not in rows:
        raise CheckpointError(
            f"a {model.__name__} with this config is no {family}", f"it can be written as: {', '.join(rows) or 'none'}"
        )
    if not rows:
        raise CheckpointError(
            f"no Hugging Face family is a {model.__name__} with this config", "keep it in our format (hub.save)"
        )
    return rows[family] if family is not None else next(iter(rows.values()))


def to_hf(
    model: nn.Module, folder: str | Path, *, family: str | None = None, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Write a folder that transformers loads. The family is found from the config unless named.

    A model that looks gets a preprocessor_config.json: what its config says of pictures or, of a tower, what came with
    it, or, if it was made here, how ours is shown pictures. A vision-language model gets all that transformers'
    processor of its family asks for (see `hub.speaking`); what of it could not be written is returned, in words.
    """
    folder, row = Path(folder), family_of(type(model), model.config, family)
    state, moves = model.state_dict(), row.moves(model.config)
    forgotten = sorted(state.keys() - {name for move in moves for name in move.ours})
    if forgotten:
        raise CheckpointError(f"the map of {row.name} forgets {forgotten[0]!r}")

    def tensors() -> Iterable[tuple[str, Tensor]]:
        for move in moves:
            yield from zip(move.theirs, move.push([state.pop(name) for name in move.ours]), strict=True)

    write_weights(folder, tensors(), stem=row.stem)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kept = {} if row.key == "_class_name" else {"dtype": dtype}  # diffusers takes it for an argument
    about = {row.key: row.name, **kept, **row.write(model.config)}
    write_json(folder / "config.json", pictures.export(model, folder, row, about))
    return speaking.export(model, folder, row, tokenizer)


def build(found: Found, dtype: torch.dtype | None, device: str) -> nn.Module:
    """The model with its weights. Every layer has a tensor of its own, so what is not stored is not built first."""
    weights, family = found.weights(), found.family
    stored, depth = len(list(weights)), layers(found.config.plain())
    if depth > stored:
        raise CheckpointError(
            f"{found.path} says {depth:,} layers and holds {stored:,} tensors",
            "does its config belong to these weights?",
        )
    try:
        with torch.device("meta"):
            model = found.model(found.config)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # sizes that no tensor can have
        raise CheckpointError(
            f"{found.path} asks for what cannot be built: {str(error).splitlines()[0]}", "is its config.json whole?"
        ) from None
    if family is None:
        assert isinstance(weights, Weights)
        tensors: Iterable[tuple[str, Tensor]] = unpacked(weights)
        if (base := base_of(found.path)) is not None:
            theirs, wanted = base.tensors(load), model.state_dict()
            tensors = joined(tensors, {name: tensor for name, tensor in theirs.items() if name in wanted})
    else:
        moves = family.moves(found.config)
        if family.outer and all(name.startswith(family.outer) for name in weights):
            moves = under("", family.outer, moves)
        tensors = _pull(weights, moves, family)
    model = _fill(model, tensors, found.path, dtype, device)
    pictures.remember(model, found.path, own=family is None)
    speaking.remember(model, found.path)
    return model


def _pull(weights: Weights | Single, moves: list[Move], family: Family) -> Iterable[tuple[str, Tensor]]:
    """Our tensors, one move at a time, from theirs; what no move takes is refused."""
    taken = set()
    for move in moves:
        theirs = [_spelt(name, weights, family) for name in move.theirs]
        taken.update(theirs)
        yield from zip(move.ours, move.pull([weights[name] for name in theirs]), strict=True)
    left = [name for name in weights if name not in taken and not family.ignores(name)]
    for name, other in family.copies:
        if name in left:
            if not torch.equal(weights[name], weights[other]):
                raise CheckpointError(
                    f"{weights.path}: tensor {name!r} differs from {other!r}, and the config ties the two",
                    "set tie_word_embeddings to false in its config.json to load both",
                )
            left.remove(name)
    if left:
        raise CheckpointError(
            f"{weights.path} holds tensors a {family.name} has no place for: {', '.join(left[:3])}",
            "is it a checkpoint of this model, without a head or adapter of its own?",
        )


def _spelt(name: str, weights: Weights | Single, family: Family) -> str:
    """A name as this file spells it."""
    for now, then in family.older:
        if now in name and name not in weights and name.replace(now, then) in weights:
            return name.replace(now, then)
    return name


def _fill(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype | None, device: str
) -> nn.Module:
    """Give a model made on the meta device its weights, each checked by name and shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    exact = _exact(model)
    state = {}
    for name, tensor in tensors:
        if name not in wanted:
            raise CheckpointError(f"{source} holds tensor {name!r}, which this model has no place for")
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(
                f"tensor {name!r} of {source} has shape {tuple(tensor.shape)}, the model's is {wanted[name]}",
                "does its config belong to these weights?",
            )
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() or name in exact else dtype
        state[name] = tensor.to(device, kept)
    missing = [name for name in wanted if name not in state]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{source} lacks tensor {missing[0]!r}{more}", "was it saved whole, by this version?")
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, Rotary | FSQ):  # tables that follow from the config
            module.fill(torch.device(device))
    return model.eval()


def _exact(model: nn.Module) -> set[str]:
    """Tensors that keep their type: codebooks and running means, by which ids are made."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Quantizer)]
    return {f"{name}.{own}".lstrip(".") for name, module in found for own, _ in module.named_buffers(recurse=False)}
