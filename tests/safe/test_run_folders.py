"""Run folders from elsewhere: nothing outside is touched, damage is named, and what the system refuses is told."""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.observers import Interrupting
from tests.plugin_methods import assert_same, entered, small, upfl
from upfl import api
from upfl.engine.folder import CHECKPOINT, PREVIOUS, RunFolder
from upfl.errors import RunError, WriteError
from upfl.safe import tensors
from upfl.safe.folder import Folder

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
refuse: list[Callable[[str, str], None]] = []  # asked before every change of a folder
sys.addaudithook(lambda event, told: [ask(*told) for ask in refuse] if event == "upfl.folder" and refuse else None)


@pytest.fixture(autouse=True)
def _counting() -> Iterator[None]:
    with entered():
        yield
    refuse.clear()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its third round, and one that was not beside it."""
    path = tmp_path_factory.mktemp("runs")
    with entered():
        api.train(small(checkpoint_every=1), path / "whole", workers=1)
        with pytest.raises(KeyboardInterrupt):
            api.train(small(checkpoint_every=1), path / "run", workers=1, observer=Interrupting(3))
    return path / "run"


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Links


@pytest.mark.parametrize(
    "name", ["memory", "memory/0", "best", "metrics.jsonl", CHECKPOINT, "result.json", "config.toml"]
)
def test_a_link_out_of_a_run_folder_is_not_followed(name: str, run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    if (run / name).is_dir():
        shutil.copytree(run / name, victim)
        shutil.rmtree(run / name)
        for folder in ("a", "round-7"):
            (victim / folder).mkdir()
            (victim / folder / "precious.txt").write_text("precious")
    else:
        victim.write_text('{"precious": 1}\n' * 9) if not (run / name).exists() else shutil.copy(run / name, victim)
        (run / name).unlink(missing_ok=True)
    before = contents(victim) if victim.is_dir() else victim.read_bytes()
    (run / name).symlink_to(victim)
    said = upfl("resume", run, "--workers", "1")
    assert (contents(victim) if victim.is_dir() else victim.read_bytes()) == before
    assert said.code == (0 if name == "result.json" else 4), said.err  # what is only removed is the link
    if said.code:
        assert "link" in said.err or "not a run folder" in said.err


def test_a_file_with_a_second_name_elsewhere_is_not_changed(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + "more\n")
    os.link(run / "metrics.jsonl", tmp_path / "other")
    before = (tmp_path / "other").read_bytes()
    assert upfl("resume", run, "--workers", "1").code == 4
    assert (tmp_path / "other").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", CHECKPOINT, "config.toml", "result.json", "environment.json"])
def test_a_pipe_in_place_of_a_file_does_not_keep_anybody_waiting(name: str, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    said = upfl("resume", run, "--workers", "1")
    assert said.code == (0 if name in ("result.json", "environment.json") else 4), said.err


def test_names_that_lead_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd", "", "a//b", ".", "a/\0"):
        for use in (Folder(tmp_path).read, Folder(tmp_path).remove, Folder(tmp_path).exists):
            with pytest.raises(RunError, match="not the name of a file in it"):
                use(name)


def test_all_files_of_a_run_have_the_permissions_that_the_user_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        api.train(small(rounds=1), tmp_path / "run", workers=1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert modes == {0o640}


# Damage


def flipped(file: Path, place: int, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= bit
    file.write_bytes(content)


def test_a_flipped_bit_in_a_checkpoint_is_found_and_the_one_before_it_goes_on_to_the_same_bits(
    run: Path, stopped: Path
) -> None:
    assert (run / PREVIOUS).exists()
    for place in (-1, -1000):
        flipped(run / CHECKPOINT, place)
        said = upfl("resume", run, "--workers", "1")
        said.ended(4, f"{CHECKPOINT}: damaged (its content does not have its digest)")
        assert f"`upfl resume {run} --from-previous` goes on" in said.err.replace("\n", "")
    assert upfl("resume", run, "--workers", "1", "--from-previous").code == 0
    assert_same(run, stopped.parent / "whole")
    assert "there is no checkpoint before the last one" in upfl("resume", run, "--from-previous").err


def test_a_flipped_bit_in_a_memory_is_found_and_the_checkpoint_before_goes_on_to_the_same_bits(
    run: Path, stopped: Path
) -> None:
    newest = list(run.glob("memory/*/*-2.safetensors"))  # the checkpoint before names older ones
    for file in newest:
        flipped(file, -1)
        with pytest.raises(
            RunError, match=r"-2\.safetensors: damaged \(its content does not .* --from-previous` goes on"
        ):
            RunFolder(run).load_memory(int(file.stem.split("-")[0]), 2, CPU)
    assert len(newest) == 3
    assert upfl("resume", run, "--workers", "1", "--from-previous").code == 0
    assert_same(run, stopped.parent / "whole")


def test_a_memory_of_another_run_is_not_taken_for_the_one_that_the_checkpoint_names(run: Path) -> None:
    folder = RunFolder.open(run)
    progress = folder.load(CPU)
    assert progress is not None
    client = int((progress.memory_rounds >= 0).nonzero()[0])
    round = int(progress.memory_rounds[client])
    memory = folder.load_memory(client, round, CPU)
    folder.save_memory(client, round, {name: value + 1 for name, value in memory.items()})
    with pytest.raises(RunError, match=rf"{client}-{round}\.safetensors: is not the file that the checkpoint names"):
        folder.load_memory(client, round, CPU)


def test_a_flipped_bit_in_a_best_state_or_another_states_file_is_found(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped.parent / "whole", tmp_path / "run")
    run = api.Run(tmp_path / "run")
    (row,) = run.result["rows"]
    file = tmp_path / "run" / "best" / f"round-{row['best_round']}.safetensors"
    content = file.read_bytes()
    flipped(file, -1)
    with pytest.raises(RunError, match=r"round-\d\.safetensors: damaged"):
        RunFolder(run.path).load_best(row["best_round"])
    file.write_bytes(content)
    state = load_file(file)
    tensors.save(Folder(file.parent), file.name, {name: value + 1 for name, value in state.items()}, {})
    with pytest.raises(RunError, match="is not the file that the checkpoint names"):
        RunFolder(run.path).load_best(row["best_round"])


def test_a_changed_line_of_metrics_is_found(run: Path, stopped: Path, tmp_path: Path) -> None:
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"clients": 3', '"clients": 4', 1))
    upfl("resume", run, "--workers", "1").ended(4, "metrics.jsonl: damaged: a line")
    shutil.copytree(stopped.parent / "whole", tmp_path / "whole")
    file = tmp_path / "whole" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round": 2', '"round": 9', 1))
    with pytest.raises(RunError, match="a line that the checkpoint counts was changed"):
        _ = api.Run(tmp_path / "whole").metrics


def rewritten(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A checkpoint with other facts, whose digest fits: whoever changes it can write that, too."""
    folder = Folder(run)
    state, header = tensors.load(folder, CHECKPOINT)
    facts = json.loads(header.metadata["upfl"])
    change(facts)
    tensors.save(folder, CHECKPOINT, state, {"upfl": json.dumps(facts)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda facts: facts.update(round="3"), "round: "),
        (lambda facts: facts.update(round=-1), "round: "),
        (lambda facts: facts.update(round=10**30), "round: "),
        (lambda facts: facts.update(best=[]), "best: "),
        (lambda facts: facts.update(best={"counting": {}}), r"best\.counting\.round: "),
        (lambda facts: facts["best"].update(other=facts["best"]["counting+none"]), "best.other: its clients' counts"),
        (lambda facts: facts["best"]["counting+none"].update(round=9), "a best round that was not there yet"),
        (lambda facts: facts.update(format=3), r"its format \(3\) is not one of this version's \(1, 2\)"),
        (lambda facts: facts.update(format="2.0"), "its format"),
        (lambda facts: facts.update(format=1), "its digest is missing"),
        (lambda facts: facts.pop("metrics_bytes"), "metrics_bytes"),
        (lambda facts: facts.update(tensors=0), "missing: tensors"),
        (lambda facts: facts.update(metrics_bytes=10**9), "shorter than the checkpoint says"),
        (lambda facts: facts.update(run="0"), "another data set, partition, model, training or seed"),
        (lambda facts: facts.clear(), r"its format \(None\)"),
    ],
)
def test_facts_of_a_checkpoint_that_cannot_be_are_refused_by_name(
    change: Callable[[dict[str, Any]], Any], says: str, run: Path
) -> None:
    rewritten(run, change)
    with pytest.raises(RunError, match=says):
        api.resume(run, workers=1)


def test_tensors_of_a_checkpoint_that_are_not_the_trainings_are_refused_before_they_are_read(run: Path) -> None:
    folder = Folder(run)
    state, header = tensors.load(folder, CHECKPOINT)
    facts = json.loads(header.metadata["upfl"])
    first = next(iter(state))
    for changed in (
        {**state, first: torch.zeros(2**10, 2**10)},
        {**state, first: state[first].double()},
        {name: value for name, value in state.items() if name != first},
        {**state, "server.more": torch.zeros(1)},
        {**state, "correct.counting+none.new": torch.ones(3, 3)},
        {**state, "memory_rounds": state["memory_rounds"] + 9},
    ):
        texts = {"upfl": json.dumps(facts | {"tensors": len(changed)})}
        tensors.save(folder, CHECKPOINT, changed, texts)
        with pytest.raises(RunError, match=r"checkpoint\.safetensors: damaged"):
            api.resume(run, workers=1)


def test_facts_of_a_checkpoint_that_are_no_object_are_refused(run: Path) -> None:
    tensors.save(Folder(run), CHECKPOINT, tensors.load(Folder(run), CHECKPOINT)[0], {"upfl": "[1]"})
    with pytest.raises(RunError, match=r"checkpoint\.safetensors: its format \(None\)"):
        api.resume(run, workers=1)


@pytest.mark.parametrize("order", ["null", "3", '["a"]', "[[1]]", "{", "[" * 5000, '["\\ud800"]'])
def test_an_order_that_is_none_is_damage(order: str, run: Path) -> None:
    save_file(load_file(run / CHECKPOINT), run / CHECKPOINT, {"order": order, "upfl": "{}"})
    with pytest.raises(RunError, match=r"checkpoint\.safetensors: damaged"):
        api.resume(run, workers=1)


def test_a_checkpoint_of_the_version_before_is_read(run: Path, stopped: Path) -> None:
    state, header = tensors.load(Folder(run), CHECKPOINT)
    facts = json.loads(header.metadata["upfl"])
    facts = {key: value for key, value in facts.items() if key not in ("metrics", "states")} | {"format": 1}
    state.pop("memory_digests")
    facts["tensors"] = len(state)
    save_file(state, run / CHECKPOINT, {"order": json.dumps(list(state)), "upfl": json.dumps(facts)})
    for file in [*run.glob("memory/*/*.safetensors"), *run.glob("best/*.safetensors")]:
        old = tensors.read_file(file)
        save_file(old, file, {"order": json.dumps(list(old))})
    api.resume(run, workers=1)
    ours, whole = (load_file(path / CHECKPOINT) for path in (run, stopped.parent / "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole if name != "memory_digests")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"rows": 3}', '{"rows": [{}]}', "[" * 10**5, '{"rows": [], "rounds": "x"}', '{"a": 1, "a": 2}'],
)
def test_a_damaged_result_is_named_by_show(content: str, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped.parent / "whole", tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(content)
    upfl("show", tmp_path / "run").ended(4, "result.json: damaged")


# What the system refuses


@pytest.mark.parametrize("method", ["counting", "fedavg"])  # whose next round waits for a checkpoint, or does not
def test_every_write_that_the_system_refuses_ends_in_a_message_and_can_be_resumed(tmp_path: Path, method: str) -> None:
    """A full disk at each operation in turn; afterwards there is room again."""
    said: list[str] = []
    count, stop = [0], [0]

    def full(operation: str, path: str) -> None:
        count[0] += operation not in ("remove", "rename")  # what gives room back, or takes none
        if count[0] == stop[0]:
            raise OSError(28, "No space left on device")

    refuse.append(full)
    config = small(method, checkpoint_every=1)
    api.train(config, tmp_path / "reference", workers=1)
    operations = count[0]
    assert operations > 30
    for number in range(1, operations + 1, 5):
        count[0], stop[0] = 0, number
        path = tmp_path / str(number)
        with pytest.raises(WriteError) as refused:
            api.train(config, path, workers=1)
        said.append(str(refused.value))
        stop[0] = 0
        if (path / "config.toml").exists():
            api.resume(path, workers=1)
            assert_same(path, tmp_path / "reference")
        shutil.rmtree(path)
    assert all("cannot be written: No space left on device. Resume after" in text for text in said)


def test_the_next_round_begins_while_a_checkpoint_is_written_and_an_interrupt_waits_for_it(tmp_path: Path) -> None:
    begun = Event()

    class Second(Interrupting):
        def stage(self, what: str) -> None:
            if (tmp_path / "run" / "metrics.jsonl").exists():
                begun.set()
                raise KeyboardInterrupt

    def hold(operation: str, path: str) -> None:
        if operation == "rename" and path.endswith(f"/{CHECKPOINT}"):
            assert begun.wait(60), "the next round waits for the checkpoint"

    refuse.append(hold)
    with pytest.raises(KeyboardInterrupt):
        api.train(small("fedavg"), tmp_path / "run", workers=1, observer=Second(9))
    found = RunFolder.open(tmp_path / "run").load(CPU)
    assert found is not None
    assert found.round == 1


def test_a_disk_that_is_really_full_ends_in_exit_code_4(run: Path, stopped: Path, tmp_path: Path) -> None:
    """A file size limit of the system has the effect of a full disk or of a quota, at every size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (100, 3000, 6000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            said = upfl("resume", run, "--workers", "1").ended(4, "cannot be written: File too large")
            assert f"upfl resume {run}" in said.err.replace("\n", "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert upfl("resume", run, "--workers", "1").code == 0
    assert_same(run, stopped.parent / "whole")


def test_a_small_disk_and_one_that_can_only_be_read_end_in_exit_code_4(
    run: Path, stopped: Path, tmp_path: Path
) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]  # mounts that nobody else sees
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("this system allows no mount namespaces")
    (tmp_path / "disk").mkdir()
    command = [*alone, sys.executable, "-m", "tests.small_disk", str(run), str(tmp_path / "disk")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *refused, enough = [json.loads(line) for line in done.stdout.splitlines()]
    assert [attempt["code"] for attempt in refused] == [4] * len(refused), refused
    assert all("cannot be written: " in attempt["said"] for attempt in refused)
    assert all(f"upfl resume {tmp_path / 'disk' / 'run'}" in attempt["said"] for attempt in refused)
    assert enough["code"] == 0, enough
    assert_same(tmp_path / "resumed", stopped.parent / "whole")


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("{tmp}/file/run", "cannot be made: Not a directory"),
        ("/dev/null/run", "cannot be made: Not a directory"),
        ("/dev/null", "is a file"),
        ("{tmp}/" + "n" * 300, "File name too long"),
        ("/proc/upfl-run", "cannot be made: "),
    ],
)
def test_a_folder_that_cannot_be_made_ends_in_exit_code_4(out: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    scale = ("--profile", "smoke", "--rounds", "1")
    upfl("train", "fedavg", "digits", *scale, "--out", out.format(tmp=tmp_path)).ended(4, says)


def test_a_home_that_there_is_not_ends_in_a_message(tmp_path: Path) -> None:
    assert upfl("personalize", "~nosuchuser/b", "~nosuchuser/x", "-o", tmp_path / "me").code == 4
    assert upfl("show", "~nosuchuser/b").code == 4
