"""Chat templates that never end or need all memory raise TextError. Each of these once hung or ended the process."""

import pytest

from vitrail.errors import TextError
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.chat_template_presets import PRESETS

MESSAGES = [{"role": "user", "content": "a"}]
REPEAT = "{% for i in range(99999) %}"
LIMITS = r"takes more than 2 s|needs more than 1,000 MB|crashes its process|wider than 99"
ENDLESS = {
    "round": "{{ 1|round(10**9, 'floor') }}",
    "repeated squaring": "{% set ns = namespace(x=3) %}"
    + REPEAT
    + "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "nested pairs": "{% set ns = namespace(x=[]) %}"
    + REPEAT
    + "{% set ns.x = [ns.x, ns.x] %}{% if i == 40 %}{{ ns.x }}{% endif %}{% endfor %}",
    "sum of lists": "{{ range(99999)|map('string')|map('list')|sum(start=[]) }}",
    "pprint": "{% set ns = namespace(x=[]) %}"
    + "{% for i in range(22) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|pprint }}{{ ns.x|pprint }}",
    "wide format": "{{ '%.999999999f'|format(1) }}{{ '%.999999999f'|format(1) }}{{ '%.999999999f'|format(1) }}",
    "padding": REPEAT + "{{ 'a'.center(10**8) }}{% endfor %}",
    "replacement": "{% set x = 'a' * 100000 %}{% set y = x.replace('a', x) %}{{ y.replace('a', x) }}",
    "date": "{{ strftime_now('%_99999999d') }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "output": "{% set x = 'a' * 1000000 %}" + REPEAT + "{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_template(name, monkeypatch):
    monkeypatch.setenv("VITRAIL_FILE_SECONDS", "8")
    with pytest.raises(TextError, match=LIMITS) as error:
        ChatTemplate(ENDLESS[name]).render(MESSAGES)
    assert error.value.remedy
    assert ChatTemplate("{{ messages[0].content }}b").render(MESSAGES) == "ab"


def test_presets_run_without_a_process(monkeypatch):
    monkeypatch.setattr("vitrail.processing.chat_template._renderer", None)
    for name in PRESETS:
        ChatTemplate.from_preset(name)


def test_dates_of_usual_formats():
    assert ChatTemplate("{{ strftime_now('%d %b %Y %-d %02d') }}").render(MESSAGES)
