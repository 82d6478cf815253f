"""The code in README.md and docs/ runs as tests."""

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser
except ImportError:  # a bare GPU machine runs `pytest -m gpu` without the dev extra
    pass
else:
    pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]).pytest()
