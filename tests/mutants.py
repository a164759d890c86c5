"""Small faults, put into the source one at a time: does the suite find them?

    python -m tests.mutants              all of them, each against the tests that mirror its file (a quarter of an hour)
    python -m tests.mutants scaffold     those whose file or text has this in it

A fault is made in a copy of the tree, in a temporary folder. Tests of the file run until the first that fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ("src", "tests", "benchmarks", "results", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")

# A file below src/upfl, what stands there, and the fault in its place.
MUTANTS: list[tuple[str, str, str]] = [
    ("training/fedavg.py", "hyper.rate(hyper.lr, round)", "hyper.lr"),
    ("training/base.py", "self.decay ** (round / 10)", "self.decay**round"),
    ("training/base.py", "client.count / 1024", "1.0"),
    ("training/sgd.py", "(length + 1e-6) / clip", "(length + 1e-6) / (2 * clip)"),
    ("training/sgd.py", "1 - rate * weight_decay", "1.0"),
    ("training/sgd.py", 'if order == "own-first":', 'if order != "own-first":'),
    ("training/fedprox.py", "hyper.mu, [received[name]", "2 * hyper.mu, [received[name]"),
    ("training/scaffold.py", "total[name] / self.task.clients", "total.mean(name)"),
    ("training/scaffold.py", "/ steps - server[control]", "/ steps"),
    ("training/afl.py", "ordered > thresholds", "ordered >= 0"),
    ("training/fedgma.py", "agreement >= self.hyper.threshold", "agreement > 2"),
    ("training/fedper.py", "if name not in self.personal}", "}"),
    ("training/fedtta.py", "direction * (direction * ds).sum()", "direction * ds"),
    ("training/fedtta.py", "scale=-inner_lr, plus=(v, shrink))", "scale=-inner_lr, plus=(v, 1.0))"),
    ("training/fedsr.py", 'F.softplus(own["r_s"])', 'own["r_s"]'),
    ("training/fedsr.py", "{name: rest[name] for name in above}", "{}"),
    ("training/fedadg.py", "(1 - hyper.alignment) * weight, hyper", "weight, hyper"),
    ("training/fedadg.py", "classified.input_gradient + toward", "classified.input_gradient"),
    ("training/fedadg.py", "(1 - hyper.smoothing) * labels", "labels"),
    ("training/fedmd.py", "(digest, revisit) if round else", "(digest, revisit) if round > 1 else"),
    ("training/odpfl_hn.py", ".sum(0, keepdim=True) / count", ".sum(0, keepdim=True)"),
    ("training/odpfl_hn.py", 'carry["embedded"]', '0 * carry["embedded"]'),
    ("training/fedper.py", "= cut_below(task.model, self.personal)", "= None"),
    ("contract/predictor.py", "beyond(one, part)", "beyond(first, part)"),
    ("training/closed_form.py", "(0 if begins else kept)", "kept"),
    ("models/loops.py", "(top * wide + left + offset) * channels * 4", "(top * wide + left) * channels * 4"),
    ("models/loops.py", "(r + FRAME) * wide + FRAME * channels", "(r + FRAME) * wide"),
    ("models/layers.py", "inputs and compiled.slim(w)", "False"),
    ("models/winners.py", ": 5 * channels].view", "1 : 5 * channels + 1].view"),
    ("models/dots.py", "sums[c::COLUMNS]", "sums[ROWS * c : ROWS * c + ROWS]"),
    ("models/dots.py", "bias + address(4 * c)", "bias"),
    ("models/compiled.py", 'get_cpu_capability() == "AVX2"', 'get_cpu_capability() != ""'),
    ("engine/fold.py", "for factor in outer", "for factor in (outer[0], outer[0])"),
    ("engine/fold.py", "yield start * len(row)", "yield start"),
    ("models/loops.py", "np.rint(np.float64(values[i]) * factor)", "np.floor(np.float64(values[i]) * factor + 0.5)"),
    ("models/loops.py", "one > 0 if positive else one != 0", "one != 0"),
    ("models/loops.py", "        sums[:] = 0\n", ""),
    ("models/loops.py", "offset - breadth + 2)", "offset - breadth + 1)"),
    ("models/winners.py", "5, 5 * BLOCK).contiguous()", "5, 5 * BLOCK)"),
    ("models/winners.py", "floats != (torch.float32,) * 3", "False"),
    ("models/compiled.py", "not torch.is_grad_enabled()", "True"),
    ("models/compiled.py", "and getattr(one, INTEL)()", ""),
    ("models/products.py", "        and compiled.outruns_mkl()\n", ""),
    ("models/compiled.py", "token = _used.set(True)", "token = _used.set(False)"),
    ("models/trace.py", "one.rectified = type(following) is Relu", "one.rectified = True"),
    ("models/trace.py", "wide and type(following) is Relu", "wide"),
    ("models/rows.py", "whole = columns - columns % WIDE", "whole = columns"),
    ("models/rows.py", "        shrink = np.float32(1)\n", ""),
    ("models/rows.py", "totals[r, c] *= shrink", "pass"),
    ("models/rows.py", "elif shrink == 0:", "elif False:"),
    ("models/products.py", "add_open_(total.clone(), a", "add_open_(total, a"),
    ("models/products.py", "return _scaled_(total, beta).add_(", "return total.add_("),
    ("models/products.py", "_product(x, w, bias) if", "_product(x, w, None) if"),
    ("models/compiled.py", "_plain(total) and total.is_contiguous() and", "_plain(total) and"),
    ("engine/fold.py", "mul_(factor).round_()", "mul_(factor)"),
    ("state.py", "state.factors.get(name) if", "None if"),
    ("engine/local.py", "if isinstance(up, Factored)", "if False"),
    ("models/winners.py", "torch.empty_like(w)", "torch.empty(w.shape)"),
    ("engine/fold.py", "2.0 ** (62 - bits) / max(clients, 1)", "2.0 ** (63 - bits)"),
    ("engine/clients.py", "self.round * phase.iterations + t", "phase.iterations + t"),
    ("engine/clients.py", '"epoch", self.id, number', '"epoch", number'),
    ("engine/local.py", "if loss.isfinite():", "if True:"),
    ("engine/local.py", "seed(len(losses))", "pass"),
    ("engine/rounds.py", "[client for client in participants if client not in left_out]", "participants"),
    ("engine/rounds.py", "or progress.round == self.config.rounds:", "or False:"),
    ("engine/rounds.py", "            self._writing.result()\n", ""),
    ("engine/rounds.py", "self._writer.submit(self._save, progress.copied())", "self._save(progress)"),
    ("engine/rounds.py", "self._save, progress.copied())", "self._save, progress)"),
    ("engine/group.py", "key=lambda i: -cost[i]", "key=lambda i: cost[i]"),
    ("engine/group.py", "load + cost[i], count + 1", "load + 1, count + 1"),
    ("engine/cohort.py", "iterations * min(count, size)", "iterations * size"),
    ("engine/fitting.py", "kind.most(limit)", "limit"),
    ("engine/fitting.py", "refused.add(client.id)", "pass"),
    ("engine/evaluate.py", "else given.without(client)", "else given.published"),
    ("personalize/tent.py", "(len(client.x) * math.log(2))", "len(client.x)"),
    ("personalize/tent.py", "model.observed(psi, client.x) if own", "psi if own"),
    ("personalize/fedtta.py", "/ (2 * l_per * len(x))", "/ (l_per * len(x))"),
    ("personalize/fedtta.py", "waited >= hyper.patience", "waited > hyper.patience"),
    ("personalize/class_mix.py", "torch.lgamma(total) - torch.lgamma(total + r.shape[1])", "torch.lgamma(total)"),
    ("personalize/class_mix.py", "weights.clamp(min=0) * prior", "weights.clamp(min=0)"),
    ("personalize/calibration.py", "self.bias + mix.log() - self.prior.log()", "self.bias + mix.log()"),
    ("personalize/lame.py", ".fill_diagonal_(0)", ""),
    ("personalize/refit.py", "(counts < 0).any() or", ""),
    ("personalize/label_shift.py", "excess <= variance.sqrt()", "excess <= 0"),
    ("personalize/orientation.py", ".roll(-quarter * k, 0)", ".roll(quarter * k, 0)"),
    ("personalize/orientation.py", "view.flip(2)[opposite]", "view.flip(2)"),
    ("personalize/orientation.py", "server[name] - carry[name] for name", "server[name] for name"),
    ("personalize/orientation.py", "(-u.mean(0) / deviation)", "(u.mean(0) / deviation)"),
    ("personalize/auto.py", "> error.clamp(min=0).sqrt():", "> 0:"),
    ("personalize/auto.py", "gain >= -variance.clamp(min=0).sqrt()", "gain >= 0"),
    ("flower/messages.py", "if not values.flags.c_contiguous:", "if False:"),
    ("flower/messages.py", "start += name_length\n", "start += 0\n"),
    ("bundle/read.py", "if sums.get(name) != digest(folder, name):", "if name not in sums:"),
    ("bundle/read.py", "version != SCHEMA", "version > SCHEMA"),
    ("bundle/read.py", "if logits.shape != (2, classes):", "if False:"),
    ("bundle/read.py", "if set(manifest.fitted) != fitted:", "if False:"),
    ("bundle/read.py", "(tensors[name] >= low)", "(tensors[name] == tensors[name])"),
    ("bundle/read.py", "training.model.layout(select(tensors, str(i)))", "select(tensors, str(i))"),
    ("bundle/write.py", "    check_finite(state, WEIGHTS)\n", ""),
    ("bundle/publish.py", "        shutil.rmtree(expanded(out))\n", ""),
]
# Tests that a file has beside the one that mirrors it (training/fedavg.py: tests/training/test_fedavg.py), below tests.
FURTHER: dict[str, list[str]] = {
    "training/base.py": ["training/test_fedavg.py"],
    "training/sgd.py": ["training/test_fedavg.py", "training/test_fedtta.py"],
    "training/fedsr.py": ["models/test_statistics.py"],
    "training/fedper.py": ["personalize/test_pfl.py"],
    "contract/predictor.py": ["personalize/test_pfl.py"],
    "training/fedmd.py": ["training/test_fedmd_runs.py"],
    "models/layers.py": ["models/test_compiled.py"],
    "models/loops.py": ["models/test_compiled.py", "engine/test_fold.py"],
    "models/winners.py": ["models/test_compiled.py"],
    "models/products.py": ["models/test_products.py"],
    "models/rows.py": ["models/test_products.py"],
    "models/operations.py": ["models/test_products.py"],
    "models/trace.py": ["models/test_compiled.py", "models/test_products.py"],
    "models/compiled.py": ["models/test_compiled.py", "models/test_products.py", "models/test_dots.py"],
    "state.py": ["training/test_odpfl_hn.py"],
    "engine/local.py": [
        "training/test_odpfl_hn.py",
        "engine/test_rounds.py",
        "models/test_module.py",
        "models/test_own_models.py",
    ],
    "engine/rounds.py": ["safe/test_run_folders.py"],
    "engine/cohort.py": ["engine/test_group.py"],
    "engine/fitting.py": ["personalize/test_refit.py"],
    "engine/evaluate.py": ["engine/test_held_out.py", "engine/test_fitting.py", "personalize/test_calibration.py"],
    "personalize/tent.py": ["models/test_statistics.py"],
    "personalize/calibration.py": ["personalize/test_label_shift.py"],
    "bundle/read.py": ["bundle/test_write.py", "bundle/test_model.py"],
    "bundle/write.py": ["bundle/test_read.py"],
    "bundle/publish.py": ["bundle/test_write.py", "bundle/test_read.py"],
}


def main(wanted: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if wanted in " ".join(mutant)]
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "tree"
        copy.mkdir()
        for name in KEPT:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        missed = [one for one in chosen if not _found(copy, *one)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found")
    return bool(missed)


def _found(copy: Path, file: str, old: str, new: str) -> bool:
    source = copy / "src" / "upfl" / file
    text = source.read_text()
    if old not in text:
        print(f"GONE       {file}: {old!r} does not stand there any more")
        return False
    source.write_text(text.replace(old, new, 1))
    mirrored = str(Path(file).with_name(f"test_{Path(file).name}"))
    tests = [f"tests/{name}" for name in (mirrored, *FURTHER.get(file, [])) if (copy / "tests" / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:cacheprovider"]
    paths = os.pathsep.join(map(str, (copy / "src", copy)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True, text=True, check=False)
    source.write_text(text)
    found = done.returncode == 1  # a test failed; other codes are pytest's own troubles
    by = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    print(f"{'found' if found else 'NOT FOUND'}  {file}: {old!r} -> {new!r}  {by}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
