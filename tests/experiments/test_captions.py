"""Captions with the origin of the data."""

from experiments.report.captions import format_caption


def test_caption_has_known_origin_only(tmp_path):
    about = {"command": "a <b>", "device": "H200", "note": "c & d"}
    assert format_caption("One < two", about, tmp_path) == (
        'One &lt; two <span class="origin"><code>a &lt;b&gt;</code>, H200, '
        f"read from {tmp_path}. Note: c &amp; d.</span>"
    )
    assert format_caption("x", {}) == 'x <span class="origin">computed for this page.</span>'
