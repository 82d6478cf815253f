"""Options of commands from the fields of configs."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from vitrail.config import ConfigOption

DeviceOption = Annotated[str | None, Parameter(help="cpu, cuda, … Default: cuda if available.")]
NEGATIVE_FLAGS = {"held_out": "--seen", "unseen_classes": "--seen"}  # option → flag that switches it off
NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def add_options(
    command: Callable[..., Any],
    arguments: Sequence[inspect.Parameter],
    options: Sequence[ConfigOption],
    hidden: Sequence[str] = (),
    aliases: Mapping[str, str] = NO_ALIASES,
) -> None:
    """Give a command that takes keyword arguments the signature of its arguments and options.

    hidden   options that help does not show
    aliases  option → short form, such as -o
    """
    built = [_build_parameter(option, option.name not in hidden, aliases.get(option.name)) for option in options]
    parameters = [*arguments, *sorted(built, key=lambda parameter: parameter.default is not parameter.empty)]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _build_parameter(option: ConfigOption, show: bool, alias: str | None) -> inspect.Parameter:
    """Build the parameter of an option. Flags have no negative form, unless they are on by default."""
    text = option.description
    first_word = re.split(r"\W", text, maxsplit=1)[0]
    if first_word.isalpha() and first_word not in get_args(option.type):
        text = text[:1].upper() + text[1:]
    negative = None if option.default is True else NEGATIVE_FLAGS.get(option.name, "")
    shown = Parameter(help=f"{text}." if text else "", negative=negative, show=show, alias=alias)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.is_required else option.default,
        annotation=Annotated[option.type, shown],
    )
