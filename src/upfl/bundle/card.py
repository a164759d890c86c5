"""Model cards: what a bundle is, what it is good for and what not, for whoever receives it."""

from typing import Any

from upfl.bundle.manifest import FederationManifest, PersonalManifest, TaskSection
from upfl.methods import personalizer_class, training_class
from upfl.safe.text import counted, markdown


def federation_card(manifest: FederationManifest) -> str:
    training, task, summary = manifest.training, manifest.task, manifest.summary
    kind = training_class(training.name)
    lines = [
        f"# {kind.title} on {markdown(task.name)}: a bundle for newcomers",
        "",
        f"A model that a federation of {training.clients} clients trained in {counted(training.round, 'round')}, for",
        f"newcomers who have {task.input.noun} but no labels: each makes a model of its own of it, on its own machine.",
        "",
        "```",
        f"upfl personalize BUNDLE DATA -o ME     # DATA: {_formats(task)}; no labels",
        f"upfl predict ME MORE                   # later {task.input.noun}",
        "```",
        "",
        *_input_lines(task),
        "",
        *_architecture_lines(manifest),
        "## Personalizers",
        *(
            f"- `{name}`: {personalizer_class(name).title}{' (the default)' if name == manifest.default else ''}"
            for name in manifest.personalizers
        ),
        "",
    ]
    if scores := summary.get("scores"):
        lines += [
            "Accuracy in percent: on training clients' validation data (by which the default was chosen), and on new",
            "clients' data before and after personalization. Each at the round that is best for it by validation; the",
            f"bundle has round {training.round}.",
            "",
            "| personalizer | round | validation | new clients before | after |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {markdown(name)} | {row['round']} | "
                f"{row['validation']:.1f} | {_score(row, 'before')} | {_score(row, 'after')} |"
                for name, row in scores.items()
            ),
            "",
        ]
    facts = {key: value for key, value in summary.items() if key != "scores" and value not in ([], {}, None)}
    lines += ["## Training", *(f"- {markdown(key)}: {markdown(_in_words(value))}" for key, value in facts.items()), ""]
    fitted = f"; fitted after training, from sums over clients: {', '.join(manifest.fitted)}" if manifest.fitted else ""
    lines += ["## What is in it", f"Model parameters{fitted}. No sample and no label of any client."]
    if manifest.public:
        lines.append(f"{manifest.public} public, unlabelled {task.input.noun}, which everyone in the federation has.")
    if manifest.members:
        lines += [
            "",
            f"**Warning.** {kind.title} publishes training clients' own layers.",
            f"This bundle holds those of {manifest.members} clients, which may tell about their data.",
            "Pass it on only to those whom these clients trust.",
        ]
    lines += [
        "",
        "## Limits",
        "It knows the classes above and no others. What it is worth on data unlike the training clients' is not known:",
        "`upfl personalize` says whether yours are like them; look at its class mix, too, and at some predictions.",
        "Checksums (`sha256sum -c SHA256SUMS`) find damage; they do not tell who made this.",
        "",
    ]
    return "\n".join(lines)


def personal_card(manifest: PersonalManifest) -> str:
    kind, diary, noun = training_class(manifest.training.name), manifest.diary, manifest.task.input.noun
    lines = [
        f"# A model of one's own: {kind.title} on {markdown(manifest.task.name)}",
        "",
        f"Personalized on {manifest.samples} {manifest.task.input.noun} without labels by `{manifest.personalizer}`:",
        f"{markdown(diary.decision)}.",
        "",
        "```",
        f"upfl predict ME DATA                   # DATA: {_formats(manifest.task)}",
        "```",
        "",
        *_input_lines(manifest.task),
        "",
        f"Its parameters were found from the {noun} that it was personalized on, and may tell about them: treat it as",
        f"you treat the {noun}.",
        *(["It holds training clients' own layers, too: pass it on to nobody."] if kind.publishes_memory else []),
        "",
    ]
    return "\n".join(lines)


def _score(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.1f}" if key in row else "no labels"


def _formats(task: TaskSection) -> str:
    return "a folder of images, .npy, .npz or idx" if task.input.kind == "pixels" else ".csv, .parquet, .npy or .npz"


def _input_lines(task: TaskSection) -> list[str]:
    return [
        "## Task",
        f"{markdown(task.input.in_words)}, to {len(task.classes)} classes:",
        f"{', '.join(map(markdown, task.classes))}.",
    ]


def _architecture_lines(manifest: FederationManifest) -> list[str]:
    if not manifest.architectures:
        return []
    names = ", ".join(map(markdown, manifest.architectures))
    return [f"A newcomer chooses the size of its model (`--architecture`): {names}.", ""]


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_in_words(part)}" for key, part in value.items())
    return "; ".join(map(_in_words, value)) if isinstance(value, list | tuple) else str(value)
