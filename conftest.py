"""The code in README.md and docs/ runs as tests."""

try:
    import sybil  # noqa: F401
except ModuleNotFoundError:  # a bare GPU machine runs `pytest -m gpu` without the dev extra
    pass
else:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
    from sybil.sybil import SybilCollection

    from docs_blocks import PAGE_PARSERS, add_skip_conditions, enter_folder, leave_folder

    # All blocks of these pages run in an empty folder.
    FOLLOWED_PAGES = ["docs/quickstart.md", "docs/tutorials/*.md", "docs/howto/*.md"]

    pytest_collect_file = SybilCollection(
        [
            Sybil(
                parsers=[PythonCodeBlockParser(), SkipParser()],
                patterns=["README.md", "docs/*.md"],
                excludes=FOLLOWED_PAGES,
                setup=add_skip_conditions,
            ),
            Sybil(parsers=PAGE_PARSERS, patterns=FOLLOWED_PAGES, setup=enter_folder, teardown=leave_folder),
        ]
    ).pytest()
