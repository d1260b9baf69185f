"""`phaze help`: topics are listed and explained, commands too, and errors name topics that exist."""

import inspect
import pickle
import re
import traceback

import pytest

import phaze
from phaze import errors
from phaze.cli import main
from phaze.commands import COMMANDS
from phaze.commands.command import build_parser
from phaze.commands.help_topics import TERMS, TOPICS
from phaze.errors import FormatError, HardwareError, PhazeError, PlanError, QuestionError, UnknownNameError
from phaze.parallelism import STRATEGY_KEYS

MOST_LINES = 24
"""A text fits on a terminal of the usual height."""
MOST_COLUMNS = 110


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["help", *arguments]) == 0
    return capsys.readouterr().out


def test_topics_are_listed_with_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys)
    for name, topic in TOPICS.items():
        assert re.search(rf"^  {name} +{re.escape(topic.summary)}$", told, re.MULTILINE)


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_is_short_and_printed_as_it_is_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, name).startswith(f"{name}: {TOPICS[name].summary}\n\n{TOPICS[name].text}\n")
    lines = TOPICS[name].text.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_COLUMNS


@pytest.mark.parametrize("name", TOPICS)
def test_the_commands_of_a_topic_can_be_typed(name: str) -> None:
    for line in re.findall(r"^\$ phaze (.*)$", TOPICS[name].text, re.MULTILINE):
        build_parser(COMMANDS).parse_args(line.split())


def test_every_command_that_a_topic_names_exists() -> None:
    names = {command.name for command in COMMANDS}
    told = {word for topic in TOPICS.values() for word in re.findall(r"(?:`|\$ )phaze ([a-z]+)", topic.text)}
    assert told <= names
    named_topics = {word for topic in TOPICS.values() for word in re.findall(r"phaze help ([a-z]+)", topic.text)}
    assert named_topics <= {*TOPICS, *names}


def test_the_text_on_strategies_has_every_key() -> None:
    told = TOPICS["strategy"].text
    assert [key for key in STRATEGY_KEYS if not re.search(rf"\b{key}\b", told)] == []


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_the_help_of_a_command_is_what_its_own_option_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, name)
    if name in TOPICS:
        assert f"`phaze {name} --help`" in told
        return
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert told == capsys.readouterr().out


def test_a_misspelt_topic_is_answered_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "stratgy"]) == 1
    assert "unknown topic 'stratgy'. Did you mean strategy?" in capsys.readouterr().err


CLASSES = sorted(
    (
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, PhazeError) and value is not PhazeError
    ),
    key=lambda value: value.__name__,
)


def test_every_word_and_class_that_leads_to_a_topic_leads_to_one_that_exists() -> None:
    by_class = {value.topic for value in CLASSES if value.topic}
    assert {*by_class, *errors.TOPIC_OF_WORD.values(), *TERMS.values()} <= set(TOPICS)


def test_every_error_class_has_a_topic_or_is_left_without_one_on_purpose() -> None:
    """Graphs and schedules contradict themselves in too many ways for one text; of plans the first word decides."""
    without = {value for value in CLASSES if value.topic is None}
    assert without == {errors.GraphError, errors.ScheduleError, PlanError, QuestionError, UnknownNameError}


@pytest.mark.parametrize(
    ("error", "topic"),
    [
        (HardwareError("no such chip"), "cluster"),
        (FormatError("plan.json is cut short"), "files"),
        (QuestionError("strategy has dp 3, but ..."), "strategy"),
        (QuestionError("precision is 'bf15'; expected ..."), "precision"),
        (QuestionError("progress is 3; expected a function."), None),
        (UnknownNameError("model or missing file", "gpt", ["gpt2"]), "models"),
        (UnknownNameError("term of a calibration", "x", ["matrix"]), "calibration"),
        (UnknownNameError("layer", "x", ["h.0"]), None),
        (PlanError("the plan is of another model"), None),
        (PlanError("target 'torchtitan' cannot run this plan: it has ZeRO stage 1."), "targets"),
    ],
    ids=str,
)
def test_an_error_leads_to_the_topic_that_explains_it(error: PhazeError, topic: str | None) -> None:
    assert error.topic == topic
    assert traceback.format_exception_only(error)[1:] == ([f"see: phaze help {topic}\n"] if topic else [])


def test_an_error_without_a_topic_takes_that_of_the_call_which_it_leaves() -> None:
    with pytest.raises(PlanError, match="cannot be sliced as asked") as raised:
        phaze.evaluate("gpt2", cluster="a100-80gb:8", strategy={"tp": 5})
    assert raised.value.__notes__ == ["see: phaze help strategy"]
    with pytest.raises(QuestionError) as raised, errors.explained_by("search"), errors.explained_by("files"):
        raise QuestionError("precision is 'bf15'; expected ...")
    assert raised.value.topic == "precision"


def test_an_error_without_any_topic_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "see: phaze export --help"


def test_every_word_of_a_printed_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    plan = phaze.evaluate("gpt2", cluster="a100-80gb:8", strategy={"pp": 2, "tp": 2}, compares=False).plan
    heads = {line.split()[0] for line in str(plan).splitlines() if line.startswith(("strategy", "step", "p"))}
    words = [
        *heads,
        "dp",
        "tp",
        "pp",
        "microbatch",
        "zero",
        "recompute",
        "MFU",
        "compute",
        "exposed",
        "bubble",
        "update",
    ]
    words += [*(plan.stages[0].memory_bytes.keys() - {"total", "capacity"}), "fits", "marginal", "over", "ideal"]
    for word in [*words, "bound", "gap", "slicing", "target"]:
        assert len(printed(capsys, word).splitlines()) > 5


def test_an_error_from_another_process_leads_to_its_topic_once() -> None:
    error: PhazeError = pickle.loads(pickle.dumps(HardwareError("no such chip")))
    assert error.__notes__ == ["see: phaze help cluster"]
    unknown = UnknownNameError("solver", "cplx", ["cp-sat", "highs"])
    restored: UnknownNameError = pickle.loads(pickle.dumps(unknown))
    assert (str(restored), restored.known, restored.__notes__) == (str(unknown), unknown.known, unknown.__notes__)


@pytest.mark.parametrize(
    ("arguments", "topic"),
    [
        (["optimize", "gpt2", "--cluster", "a100"], "cluster"),
        (["optimize", "gpt", "--cluster", "a100-80gb:8"], "models"),
        (["optimize", "gpt2", "--cluster", "a100-80gb:8", "--precision", "bf15"], "precision"),
        (["optimize", "gpt2", "--cluster", "a100-80gb:8", "--objective", "money"], "objectives"),
        (["optimize", "gpt2", "--cluster", "a100-80gb:8", "--target", "titan"], "targets"),
        (["evaluate", "gpt2", "--cluster", "a100-80gb:8", "--strategy", "tpp=5"], "strategy"),
        (["optimize", "gpt2", "--cluster", "a100-80gb:99999999"], "limits"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_last_line_of_an_error_names_the_topic(
    arguments: list[str], topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"see: phaze help {topic}"
