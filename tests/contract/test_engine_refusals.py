"""What every engine promises of requests that it cannot answer."""

from __future__ import annotations

import pytest
from engine_contract import ENGINE_TESTS, TIMEOUT, Served, picture
from relax_server.engines.base import GenerateRequest, MediaItem
from relax_server.engines.http import HttpEngine

from relax_sdk.errors import EngineError, EngineUnavailable

pytestmark = ENGINE_TESTS


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("../../etc/passwd", "no such file"),
        ("/etc/passwd", "no such file"),
        ("missing.png", "no such file"),
        ("https://example.com/a.png", "not fetched"),
        ("data:image/png;base64,AAAA", "not a readable image"),
        ("data:image/png;base64,!", "base64"),
        ("data:image/png,AAAA", "data URI"),
    ],
)
async def test_bad_media_are_refused_with_a_reason(served: Served, takes_media: None, url: str, says: str):
    image = picture()
    good = served.request([image, "?"])
    bad = GenerateRequest(good.input_ids, good.sampling, (MediaItem(image.ref, url),))
    with pytest.raises(EngineError, match=says):
        await served.engine.generate(bad, TIMEOUT)


async def test_placeholders_and_media_must_agree(served: Served, takes_media: None):
    request = served.request([picture(), "?"])
    for media in ((), request.media * 2):
        with pytest.raises(EngineError, match=r"image.*1") as caught:
            await served.engine.generate(GenerateRequest(request.input_ids, request.sampling, media), TIMEOUT)
        assert not isinstance(caught.value, EngineUnavailable)
    expanded = served.old.processor.expand(request.input_ids, served.old.features([picture()]))
    with pytest.raises(EngineError, match="one placeholder per media item"):
        await served.engine.generate(GenerateRequest(expanded, request.sampling, request.media), TIMEOUT)


async def test_what_can_never_fit_is_refused(served: Served):
    with pytest.raises(EngineError, match="tokens") as caught:
        await served.one(served.request(["x" * 4000], max_new_tokens=1000))
    assert not isinstance(caught.value, EngineUnavailable)


async def test_an_engine_that_does_not_answer_in_time_is_unavailable(served: Served):
    with pytest.raises(EngineUnavailable, match="within"):
        await served.engine.generate(served.request(["slow"], max_new_tokens=3000), 0.2)
    assert len((await served.one(served.request(["next"]))).response_ids) == 6
    with pytest.raises(EngineUnavailable):
        await HttpEngine("http://127.0.0.1:9").generate(served.request(["nobody"]), 5)
