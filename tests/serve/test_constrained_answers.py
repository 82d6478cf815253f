"""Schema answers and tool calls always parse and validate, streamed or not, next to other requests."""

import json
import random

import httpx2 as httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from serve.constrained_steps import CITY, PIPELINE, compare_overlapping_steps, text_pipeline
from serve.test_openai_server import BLUE, CHAT, image_message
from vitrail.generate import SamplingConfig
from vitrail.pipelines import load
from vitrail.processing.tokenizer import Tokenizer
from vitrail.serve import token_constraints
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.openai_schema import APIError, parse_request
from vitrail.serve.openai_schema import ChatCompletionRequest as ChatRequest
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server_process import open_server
from vitrail.serve.token_constraints import ConstraintCompiler, ConstraintError, build_json_grammar
from vitrail.serve.tool_calls import HERMES, LLAMA, ToolCallParser, build_tool_grammar

pytest.importorskip("llguidance")

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
# Templates that write tools and calls as those of Qwen and of Llama do.
MESSAGES = "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
HERMES_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + MESSAGES
    + "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{# arguments #}{% endfor %}{{ '\n' }}{% endfor %}a:"
)
LLAMA_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + MESSAGES
    + "{{ '{\"parameters\": ' }}{{ c.function.arguments | tojson }}}{% endfor %}{{ '\n' }}{% endfor %}a:"
)
COMPILER = ConstraintCompiler(PIPELINE.tokenizer, PIPELINE.tokenizer.stop_ids)


def tool_model(template: str) -> ServedModel:
    pipeline = text_pipeline(context=2000)
    pipeline.tokenizer.chat_template = template
    return ServedModel("tiny", pipeline)


# Schemas whose values have a bounded length, so that a random model ends them.
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.just({"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from(["é", 'a"b', 3, None]), min_size=1, unique_by=str)),
    st.builds(lambda v: {"const": v}, st.sampled_from(["x", 1.5, [1], {"a": None}])),
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "name", "é", "with space", 'q"'])


def branch(inner):
    return st.one_of(
        st.builds(
            lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
            inner,
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        st.builds(
            lambda fields, optional: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[optional:],
                "additionalProperties": False,
            },
            st.dictionaries(NAMES, inner, max_size=3),
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    )


SCHEMAS = st.recursive(LEAVES, branch, max_leaves=5)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SCHEMAS, min_size=1, max_size=3), st.integers(0, 1000))
def test_answers_validate_and_other_rows_do_not_change(schemas, seed):
    engine = Engine(PIPELINE.model, EngineConfig(max_num_seqs=8), num_known_ids=PIPELINE.tokenizer.vocab_size)
    prompt = EnginePrompt(PIPELINE.tokenizer.encode("a dog and", add_special_tokens=True))
    stop_ids = tuple(PIPELINE.tokenizer.stop_ids)
    free = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, sampling=SamplingConfig(temperature=1.0, seed=seed), logprobs=2),
    ]
    bound = [
        SamplingParams(
            max_new_tokens=1500,
            stop_ids=stop_ids,
            sampling=SamplingConfig(temperature=1.0, seed=seed, repetition_penalty=1.1 if i == 1 else 1.0),
        )
        for i in range(len(schemas))
    ]
    constraints = [COMPILER.compile(build_json_grammar(schema)) for schema in schemas]
    outputs = engine.generate([prompt] * (len(schemas) + 2), [*free, *bound], [None, None, *constraints])
    assert [one.ids for one in outputs[:2]] == [one.ids for one in engine.generate([prompt] * 2, free)]
    for schema, output in zip(schemas, outputs[2:], strict=True):
        assert output.end == "stop"
        text = PIPELINE.tokenizer.decode(output.ids, skip_special_tokens=True)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert engine.stats.pages_used == 0


def test_steps_that_overlap_give_the_same_answers():
    for output in compare_overlapping_steps("cpu"):
        jsonschema.validate(json.loads(PIPELINE.tokenizer.decode(output.ids)), CITY)


def test_the_mask_leaves_only_tokens_that_continue_the_grammar():
    constraint = COMPILER.compile(build_json_grammar({"enum": ["cat", "cow"]}))
    for text, expected in (('"', '"'), ("c", "c"), ("a", "ao")):
        mask = constraint.compute_mask()
        allowed = [i for i in range(PIPELINE.tokenizer.vocab_size) if mask[i // 32] >> (i % 32) & 1]
        texts = {PIPELINE.tokenizer.decode([i]).strip() for i in allowed}
        assert {one[0] for one in texts} == set(expected)
        for id in PIPELINE.tokenizer.encode(text):
            assert constraint.push(id) is None
    assert isinstance(constraint.push(PIPELINE.tokenizer.encode("z")[0]), ConstraintError)


def read_stream(client: httpx.Client, body: dict) -> list[dict]:
    """Return the messages of the choices, joined from the events of a stream."""
    answer = client.post("/chat/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    choices: dict[int, dict] = {}
    for line in answer.text.split("\n\n"):
        if not line.strip() or line == "data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            own = choices.setdefault(choice["index"], {"content": "", "calls": [], "reason": None})
            own["content"] += choice["delta"].get("content") or ""
            own["calls"] += [one["function"] for one in choice["delta"].get("tool_calls", ())]
            own["reason"] = choice["finish_reason"] or own["reason"]
    return [choices[i] for i in sorted(choices)]


def read_complete(client: httpx.Client, body: dict) -> list[dict]:
    answer = client.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [
        {
            "content": one["message"]["content"] or "",
            "calls": [call["function"] for call in one["message"].get("tool_calls", ())],
            "reason": one["finish_reason"],
        }
        for one in answer.json()["choices"]
    ]


def test_schemas_through_the_server():
    answer_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    body = {**CHAT, "max_tokens": 200, "response_format": answer_format}
    with (
        open_server(ServedModel("tiny", text_pipeline(context=512))) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        for more in ({}, {"temperature": 1.0, "seed": 4, "n": 3}):
            complete = read_complete(client, {**body, **more})
            assert complete == read_stream(client, {**body, **more})
            for choice in complete:
                assert choice["reason"] == "stop"
                jsonschema.validate(json.loads(choice["content"]), CITY)
        any_object = {**body, "response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 1}
        (found,) = read_complete(client, any_object)
        assert found["content"].startswith("{")
        assert found["reason"] == "length" or isinstance(json.loads(found["content"]), dict)


SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "nothing"}, "nothing"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/missing"}, "missing"),
        ({"$ref": "http://127.0.0.1:1/x"}, "127.0.0.1"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"enum": []}, "empty"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "x-guidance": {"lenient": True}, "uniqueItems": True}, "x-guidance"),
        ({"enum": ["x" * 70_000]}, "characters"),
        ({"type": "integer", "multipleOf": 999999937}, "fuel"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)]},
         "large"),
    ],
)  # fmt: skip
def test_schemas_that_are_not_supported_name_the_field(schema, match):
    model = SERVED
    body = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with pytest.raises(APIError, match=match) as found:
        model.prepare_chat(parse_request(ChatRequest, json.dumps(body).encode()))
    assert found.value.param == SCHEMA_PARAM and found.value.status == 400


SERVED = ServedModel("tiny", text_pipeline())


def test_options_inside_a_schema_change_nothing():
    with pytest.raises(ConstraintError, match="uniqueItems"):
        inner = {"type": "array", "x-guidance": {"lenient": True}, "uniqueItems": True}
        COMPILER.compile(build_json_grammar({"type": "object", "properties": {"a": inner}}))


@pytest.mark.parametrize(("function", "match"), [("never_end", "more than"), ("use_memory", "memory")])
def test_compilation_has_limits(monkeypatch, function, match):
    process = token_constraints.LimitedProcess(f"serve.endless_compilers:{function}")
    monkeypatch.setattr(token_constraints, "_compiler", process)
    monkeypatch.setattr(token_constraints, "SHARE_OF_SECONDS", 0.02)
    with pytest.raises(ConstraintError, match=match):
        COMPILER.compile(build_json_grammar({"const": function}))


# ---- tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, LLAMA_TEMPLATE])
def test_tool_calls_are_complete_and_fit_their_schema(template):
    body = {**CHAT, "max_tokens": 600, "tools": [WEATHER, CLOCK], "temperature": 1.0, "seed": 3}
    named = {"type": "function", "function": {"name": "get_weather"}}
    with open_server(tool_model(template)) as url, httpx.Client(base_url=url, timeout=300) as client:
        for choice in ("required", named):
            asked = {**body, "tool_choice": choice, "n": 4, "parallel_tool_calls": False}
            complete = read_complete(client, asked)
            assert complete == read_stream(client, asked)
            for one in complete:
                assert one["reason"] == "tool_calls" and one["content"] == ""
                (call,) = one["calls"]
                assert call["name"] == "get_weather" or choice == "required"
                expected = CITY if call["name"] == "get_weather" else {"maxProperties": 0}
                jsonschema.validate(json.loads(call["arguments"]), expected)
        auto = {**body, "n": 4, "max_tokens": 60}
        assert read_complete(client, auto) == read_stream(client, auto)
        assert read_complete(client, {**body, "tool_choice": "none"})[0]["calls"] == []
        # The next turn has the call and its result.
        call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": 1}'}}
        turn = [
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]
        answer = client.post("/chat/completions", json={**body, "messages": [*CHAT["messages"], *turn]})
        assert answer.status_code == 200, answer.text


def test_the_template_gets_tools_and_calls():
    model = tool_model(HERMES_TEMPLATE)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": [1]}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    union = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "get_time", "parameters": union}}
    asked = {"model": "tiny", "messages": messages, "tools": [tool], "tool_choice": "auto"}
    prepared = model.prepare_chat(parse_request(ChatRequest, json.dumps(asked).encode()))
    text = model.pipeline.tokenizer.decode(prepared.prompt.ids)
    assert '"type": {"type": ["string", "null"]}' in text
    assert '<tool_call>\n{"name": "get_time", "arguments": {"zone": [1]}}\n</tool_call>' in text
    assert text.endswith("tool: noon\na:")


BAD_TOOLS = [
    ({"tools": [{**WEATHER, "type": "robot"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "object", "x-guidance": {}}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "x", "description": "</s>"}}]}, "tools[0]"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "y"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD_TOOLS)
def test_errors_of_tools_name_the_field(change, param):
    with pytest.raises(APIError) as found:
        HERMES_MODEL.prepare_chat(parse_request(ChatRequest, json.dumps({**CHAT, **change}).encode()))
    assert found.value.param == param and found.value.status == 400


HERMES_MODEL = tool_model(HERMES_TEMPLATE)


def test_a_call_can_begin_with_the_token_of_its_marker():
    tokenizer = text_pipeline().tokenizer
    tokenizer._rust.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer = Tokenizer(tokenizer._rust, tokenizer.named_special_tokens)
    asked = parse_request(ChatRequest, json.dumps({**CHAT, "tools": [CLOCK], "tool_choice": "required"}).encode())
    constraint = ConstraintCompiler(tokenizer, tokenizer.stop_ids).compile(build_tool_grammar(asked, HERMES))
    marker = tokenizer.token_to_id("<tool_call>")
    assert constraint.compute_mask()[marker // 32] >> (marker % 32) & 1
    for id in tokenizer.encode('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'):
        assert constraint.push(id) is None
    assert constraint.is_complete or constraint.push(tokenizer.stop_ids[0]) is None
    free = parse_request(ChatRequest, json.dumps({**CHAT, "tools": [CLOCK]}).encode())
    constraint = ConstraintCompiler(tokenizer, tokenizer.stop_ids).compile(build_tool_grammar(free, HERMES))
    for id in tokenizer.encode('so <tool_call>\n{"name": "get_'):
        assert constraint.push(id) is None
    assert constraint.push(tokenizer.encode("x")[0]) is not None


def test_a_template_without_tools_refuses_them():
    with pytest.raises(APIError, match="takes no tools") as found:
        SERVED.prepare_chat(parse_request(ChatRequest, json.dumps({**CHAT, "tools": [WEATHER]}).encode()))
    assert found.value.param == "tools"


CALL = '{"name": "f", "%s": {"x": "</tool_call>{"}}'


@pytest.mark.parametrize(
    ("style", "text", "content", "count"),
    [
        (HERMES, "plain < text <tool", "plain < text <tool", 0),
        (HERMES, f"so <tool_call>\n{CALL % 'arguments'}\n</tool_call>", "so ", 1),
        (
            HERMES,
            f"<tool_call>\n{CALL % 'arguments'}\n</tool_call>\n<tool_call>\n{CALL % 'arguments'}\n</tool_call>",
            "",
            2,
        ),
        (HERMES, '<tool_call>\n{"name": "f", "arg', '<tool_call>\n{"name": "f", "arg', 0),
        (LLAMA, "no {call}", "no {call}", 0),
        (LLAMA, CALL % "parameters", "", 1),
        (LLAMA, '{"name": "f"', '{"name": "f"', 0),
    ],
)
def test_calls_are_found_however_the_text_is_cut(style, text, content, count):
    for seed in range(5):
        rng, parser, found, at = random.Random(seed), ToolCallParser(style), "", 0
        while at < len(text):
            size = rng.randint(1, 7)
            found, at = found + parser.push(text[at : at + size]), at + size
        held, calls = parser.finish()
        assert (found + held, len(calls)) == (content, count)
        assert all(json.loads(call.arguments) == {"x": "</tool_call>{"} for call in calls)


@pytest.mark.slow
def test_the_openai_client_gets_json_and_tool_calls_of_mini_vlm():
    openai = pytest.importorskip("openai")
    model = ServedModel("mini-vlm", load("mini-vlm"))
    schema = {"type": "object", "properties": {"count": {"enum": [0, 1, 2]}}, "required": ["count"]}
    schema["additionalProperties"] = False
    with open_server(model) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        messages = image_message(BLUE, text="how many dogs are there?")
        answer_format = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
        answer = client.chat.completions.create(
            model="mini-vlm", messages=messages, response_format=answer_format, max_tokens=60
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
        with pytest.raises(openai.BadRequestError, match="takes no tools"):
            client.chat.completions.create(model="mini-vlm", messages=messages, tools=[WEATHER])
    with open_server(tool_model(HERMES_TEMPLATE)) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        arguments = {"model": "tiny", "messages": CHAT["messages"], "tools": [WEATHER], "tool_choice": "required"}
        (call, *_) = client.chat.completions.create(**arguments, max_tokens=500).choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITY)
