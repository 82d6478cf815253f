"""Stand-ins for a compilation that exceeds its limits. They run in the process with limits."""


def never_end(grammar: str) -> str:
    while True:
        pass


def use_memory(grammar: str) -> str:
    return str(len(bytearray(1 << 40)))
