"""What ``--device`` means, what a child gets to see, and what a worker says of its children: without any process."""

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from batchq import ConfigError
from batchq.config import BatchPolicy
from batchq.stats import from_answers
from batchq_workers import cpus, devices
from batchq_workers.config import WorkerConfig
from batchq_workers.devices import (
    Found,
    child_environment,
    choose,
    find,
    name_inside,
    parse_devices,
    visible_gpus,
)
from batchq_workers.joining import policy_that_holds, queue_config
from batchq_workers.report import Counts, Means, model_of, report_text
from batchq_workers.slots import pause_after

# --- what --device says ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cpu", ("cpu",)),
        ("mps", ("mps",)),
        ("cuda", ("cuda",)),
        ("auto", ("auto",)),
        ("cuda:0", ("cuda:0",)),
        ("cuda:1, cuda:0 ,cuda:15", ("cuda:1", "cuda:0", "cuda:15")),
        ("cpu,cuda:0", ("cpu", "cuda:0")),
    ],
)
def test_devices_are_names_with_commas_between_them(text: str, names: tuple[str, ...]) -> None:
    assert parse_devices(text) == names
    assert WorkerConfig(model="a:b", device=text).device == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("gpu", "'gpu'"),
        ("", "an empty name"),
        ("cuda:0,", "an empty name"),
        (",cpu", "an empty name"),
        ("cuda:x", "'cuda:x'"),
        ("cuda:", "'cuda:'"),
        ("cuda:-1", "'cuda:-1'"),
        ("cuda:01", "'cuda:01'"),
        ("cuda:1000", "'cuda:1000'"),
        ("cuda:0-3", "'cuda:0-3'"),
        ("CPU", "'CPU'"),
        ("cpu:0", "'cpu:0'"),
        ("cuda:0,cuda:1,cuda:0", "'cuda:0' is there twice"),
        ("cpu,cpu", "'cpu' is there twice"),
        ("auto,cpu", "'auto' stands alone"),
        ("cuda,cuda:1", "'cuda' are all GPUs"),
        (0, "not a text"),
        (None, "not a text"),
    ],
)
def test_what_is_no_device_is_named_with_what_is_allowed(text: Any, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        WorkerConfig(model="a:b", device=text)
    for each in (f"device={text!r}", part, "'auto'", "'cpu'", "'mps'", "'cuda:0'", "(default 'cpu')"):
        assert each in str(error.value)


@pytest.mark.parametrize("count", [0, 65, -1, 1.5, "2", True, None])
def test_processes_per_device_are_1_to_64(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"processes_per_device.*1 to 64.*default 1"):
        WorkerConfig(model="a:b", processes_per_device=count)


def test_a_workers_settings_reach_its_children_whole() -> None:
    policy = BatchPolicy(max_batch_cost=512, padded=True)
    config = WorkerConfig(model="a:b", device="cuda:0,cuda:1", processes_per_device=3, policy=policy)
    assert WorkerConfig.load(config.dump()) == config


# --- which there are ---


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (Found(gpus=3, mps=True), ("cuda:0", "cuda:1", "cuda:2")),
        (Found(mps=True), ("mps",)),
        (Found(), ("cpu",)),
        (Found(trouble="ImportError: no such library"), ("cpu",)),
    ],
)
def test_auto_is_all_gpus_else_mps_else_the_cpu(found: Found, chosen: tuple[str, ...]) -> None:
    assert choose(("auto",), found) == chosen


@pytest.mark.parametrize(
    ("names", "found", "message"),
    [
        (("cuda:7",), Found(gpus=2), r"device cuda:7 does not exist: there are 2 GPUs, cuda:0 to cuda:1$"),
        (("cuda:0", "cuda:1"), Found(gpus=1), r"device cuda:1 does not exist: there is one GPU, cuda:0$"),
        (("cpu", "cuda"), Found(), r"device cuda does not exist: there is no GPU"),
        (
            ("cuda:0",),
            Found(trouble="OSError: libc10"),
            r"no GPU .*\(torch cannot be imported: OSError: libc10\)",
        ),
    ],
)
def test_a_device_that_does_not_exist_is_named_with_those_that_do(
    names: tuple[str, ...], found: Found, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(names, found)


def test_devices_that_exist_are_taken_in_their_order() -> None:
    assert choose(("cuda:1", "cpu", "cuda:0"), Found(gpus=2)) == ("cuda:1", "cpu", "cuda:0")


def test_no_process_looks_for_devices_that_need_no_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_find", None)
    assert find("cpu,mps", {}) == ("cpu", "mps")
    with pytest.raises(ConfigError, match="there is one GPU"):
        find("cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-1"})


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_find", lambda *_: Found(gpus=4))
    assert find("auto", {}) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert find("auto", {"CUDA_VISIBLE_DEVICES": "2,3"}) == ("cuda:0", "cuda:1")
    assert find("auto", {"CUDA_VISIBLE_DEVICES": ""}) == ("cpu",)


def test_a_worker_that_is_told_to_stop_looks_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_LOOK", "import time; time.sleep(60)")
    assert find("auto", {}, lambda: True) == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "fails with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "fails with signal 11"),
        ("print('nonsense')", "fails with exit code 0"),
        ("import time; time.sleep(60)", "takes more than 0.2 s"),
    ],
)
def test_a_driver_that_does_not_answer_ends_the_looking(
    monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(devices, "_LOOK", code)
    if "sleep" in code:
        monkeypatch.setattr(devices, "LOOK_FOR", 0.2)
    with pytest.raises(ConfigError, match=f"looking for GPUs {message}.*driver"):
        find("auto", {})


def torch_with(gpus: int, mps: bool = False) -> types.ModuleType:
    torch: Any = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_available=lambda: gpus > 0, device_count=lambda: gpus)
    torch.backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: mps))
    return torch  # type: ignore[no-any-return]


class _Broken:
    """An installation of torch that lacks a library."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            raise OSError("libcudart.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("needed", "driver", "torch", "found"),
    [
        (0, 4, torch_with(2), Found(gpus=2)),  # auto: what torch can use
        (0, 4, torch_with(0, mps=True), Found(mps=True)),  # built for the CPU
        (0, 4, None, Found()),  # no torch: nothing to run there
        (2, 2, _Broken(), Found(gpus=2)),  # the driver knows of them: torch is not asked
        (3, 2, torch_with(3), Found(gpus=3)),  # another driver than NVIDIA's
        (3, 2, None, Found(gpus=2)),
        (1, 0, _Broken(), Found(trouble="OSError: libcudart.so: cannot open shared object file")),
    ],
)
def test_gpus_are_those_that_the_driver_or_torch_knows_of(
    needed: int,
    driver: int,
    torch: Any,
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(devices, "_gpus_of_driver", lambda: driver)
    if isinstance(torch, _Broken):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(sys, "meta_path", [torch, *sys.meta_path])
    else:
        monkeypatch.setitem(sys.modules, "torch", torch)  # None: importing it raises ModuleNotFoundError
    devices.look(needed)
    assert Found(**json.loads(capsys.readouterr().out)) == found


# --- what a child sees ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", ()),
        ("0,1", ("0", "1")),
        (" 3 , GPU-5ad ,MIG-7", ("3", "GPU-5ad", "MIG-7")),
        ("0,-1,1", ("0",)),
        ("-1", ()),
        ("1,,2", ("1",)),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(text: str | None, names: tuple[str, ...] | None) -> None:
    assert visible_gpus({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == names


@pytest.mark.parametrize(
    ("name", "every", "visible", "seen"),
    [
        ("cuda:1", ("cuda:0", "cuda:1"), None, "1"),
        ("cuda:1", ("cuda:0", "cuda:1"), "4,GPU-b", "GPU-b"),
        ("cuda:0", ("cuda:0",), "7", "7"),
        ("cuda", ("cuda",), "4,5", "4,5"),
        ("cuda", ("cuda",), None, None),
        ("cpu", ("cpu",), "4,5", "4,5"),
        ("cpu", ("cpu", "cuda:0"), None, ""),
    ],
)
def test_a_child_sees_its_gpu_alone(
    name: str, every: tuple[str, ...], visible: str | None, seen: str | None
) -> None:
    environment = {"HOME": "/"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    before = dict(environment)
    found = child_environment(name, every, 2, environment)
    assert (found["HOME"], found.get("CUDA_VISIBLE_DEVICES")) == ("/", seen)
    assert environment == before


def test_a_gpu_is_the_first_of_the_child_that_sees_it() -> None:
    assert [name_inside(name) for name in ("cuda:3", "cuda", "cpu", "mps")] == [
        "cuda:0",
        "cuda",
        "cpu",
        "mps",
    ]


@pytest.mark.parametrize(("given", "threads"), [(None, "3"), ("", "3"), ("8", "8")])
def test_a_child_has_the_threads_that_are_its_share_unless_the_user_says(
    given: str | None, threads: str
) -> None:
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    assert child_environment("cpu", ("cpu",), 3, environment)["OMP_NUM_THREADS"] == threads


# --- CPUs ---


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        # the least of what its own group and those around it allow
        ({"proc/self/cgroup": "0::/pods/a\n", "sys/fs/cgroup/pods/cpu.max": "200000 100000",
          "sys/fs/cgroup/pods/a/cpu.max": "400000 100000"}, 2),
        # a path from outside of the container, and one above its root
        ({"proc/self/cgroup": "0::/kubepods/x\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        # cgroup v1
        ({"proc/self/cgroup": "4:cpu,cpuacct:/\n1:memory:/\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "500000",
          "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 5),
        ({"proc/self/cgroup": "4:cpuacct,cpu:/docker/x\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        # two threads of a core count once
        ({f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)}, 4),
        ({"proc/self/cgroup": "nonsense:\n:::\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 8),
    ],
)  # fmt: skip
def test_usable_cpus_are_those_of_the_affinity_and_of_the_container(
    files: dict[str, str], usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cpus.usable_cpus(machine(tmp_path, files)) == usable


def test_there_is_always_a_cpu() -> None:
    assert 1 <= cpus.usable_cpus() <= (os.cpu_count() or 1)


# --- restarts ---


def test_the_first_restart_is_at_once_and_the_later_ones_take_longer_up_to_30_s() -> None:
    assert [pause_after(n) for n in range(8)] == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert {pause_after(n) for n in (8, 9, 100, 10**6)} == {30.0}


# --- whose settings hold ---


def test_the_settings_that_redis_keeps_hold_and_each_that_differs_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = BatchPolicy(max_batch_size=8, max_delay=0.02, max_batch_cost=100, padded=True)
    with caplog.at_level("WARNING"):
        assert policy_that_holds("q", BatchPolicy(), queue_config(others)) == others
    told = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert told == ["max_batch_size=8", "max_delay_us=20000", "max_batch_cost=100", "padded=1"]


@pytest.mark.parametrize("policy", [BatchPolicy(), BatchPolicy(max_batch_cost=7, padded=True, capacity=3)])
def test_settings_that_agree_are_not_worth_a_word(
    policy: BatchPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    assert policy_that_holds("q", policy, queue_config(policy)) == policy
    assert policy_that_holds("q", policy, {}) == policy  # Redis has lost them: these will be set
    assert not caplog.records


def test_where_an_older_worker_has_set_the_settings_there_is_no_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = {
        name: value
        for name, value in queue_config(BatchPolicy()).items()
        if name not in ("max_batch_cost", "padded")
    }
    assert policy_that_holds("q", BatchPolicy(max_batch_cost=9), older) == BatchPolicy()
    assert "no max_batch_cost holds" in caplog.text


@pytest.mark.parametrize(
    ("report", "model"),
    [
        ('{"model": "m:load"}', "m:load"), ('{"model": null}', None), ("{}", None), ("", None), ("[1]", None), ("1;2", None),
        ('{"model"', None),
    ],
)  # fmt: skip
def test_the_model_of_a_report_of_any_version_is_read_where_it_can_be(report: str, model: str | None) -> None:
    assert model_of(report) == model


# --- what is reported ---


def test_means_are_over_all_batches_of_all_children() -> None:
    means = Means(100.0)
    means.add([Counts(1, 10, 0.3, 0.1), Counts(3, 2, 0.1, 0.3)], 102.0)
    assert means.fields() == {"batch_size": 3.0, "run_seconds": 0.1, "wait_seconds": 0.1, "rate": 6.0}
    means.add([Counts(), Counts()], 103.0)  # nothing to do: how batches were stays worth knowing
    assert means.fields() == {"batch_size": 3.0, "run_seconds": 0.1, "wait_seconds": 0.1, "rate": 0.0}


def test_a_report_out_of_turn_disturbs_no_rate() -> None:
    means = Means(0.0)
    means.add([Counts(1, 4, 0.1, 0.1)], 0.001)
    assert means.fields()["rate"] == 0.0
    means.add([Counts(1, 4, 0.1, 0.1)], 1.0)
    assert means.fields()["rate"] == 8.0


def read(report: str) -> Any:
    """The worker's stats, as a client reads them."""
    now = int(time.time() * 1e6)
    clock = [str(now // 10**6).encode(), str(now % 10**6).encode()]
    answers: list[Any] = [
        0,
        0,
        0,
        0,
        None,
        None,
        None,
        [],
        [],
        [],
        [],
        0,
        0,
        [],
        [],
        [b"w1", f"{now};w1;{report}".encode()],
        clock,
    ]
    return from_answers("q", answers).workers


CHILDREN = [(1, "cuda:0", "ready"), (3, "cuda:1", "restarting")]


def test_what_is_reported_of_the_children_arrives_in_the_stats() -> None:
    [worker] = read(report_text(model="m:load", host="h", state="ready", means=Means(0.0), children=CHILDREN))
    assert (worker.model, worker.host, worker.state) == ("m:load", "h", "ready")
    assert [(child.child, child.device, child.state) for child in worker.children] == CHILDREN


def test_the_report_of_an_older_worker_is_read_as_ever() -> None:
    older = '{"model":"m","host":"h","state":"ready","batch_size":2,"run_seconds":0.1,"wait_seconds":0.2,"rate":9}'
    [worker] = read(older)
    assert (worker.state, worker.batch_size, worker.children) == ("ready", 2.0, ())


@pytest.mark.parametrize("report", ["", "nonsense", "[]", "{}", '{"model": "m"}', "null"])
def test_a_report_that_cannot_be_read_is_no_live_worker_and_no_error(report: str) -> None:
    assert read(report) == ()
