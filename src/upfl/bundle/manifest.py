"""What a bundle says of itself: the schema of `manifest.json`, checked field by field, every count and name bounded."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from upfl.contract import Diary
from upfl.data.forms import VOCABULARY, Form
from upfl.safe.text import has_control

SCHEMA = 1
MANIFEST, WEIGHTS, CARD, SUMS = "manifest.json", "weights.safetensors", "README.md", "SHA256SUMS"
LAYERS, CLASSES, WIDTH, PERSONALIZERS = 1000, 2**17, 4096, 200
COUNT = 10**6  # the largest whole number among a training's hyper-parameters
STEPS = 10**4  # and among a personalizer's


def _readable(text: str) -> str:
    if has_control(text):
        raise ValueError("has control characters")
    return text


def _bounded(most: int, **others: int) -> Any:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        for key, value in values.items():
            if isinstance(value, dict):
                check(value)
            elif isinstance(value, int) and abs(value) > others.get(key, most):
                raise ValueError(
                    f"{key[:80]} is {value:.3g}, and at most {others.get(key, most)} is taken from a bundle"
                )
        return values

    return AfterValidator(check)


Text = Annotated[str, Field(max_length=2000), AfterValidator(_readable)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_readable)]
Size = Annotated[int, Field(ge=1, lt=2**40)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
TrainingHyper = Annotated[dict[str, Any], _bounded(COUNT)]
PersonalizerHyper = Annotated[dict[str, Any], _bounded(STEPS)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")


class TaskSection(_Strict):
    name: Name
    classes: tuple[Name, ...] = Field(min_length=1, max_length=CLASSES)
    input: Form

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("two classes have the same name")
        return self


_WEIGHTS = {"name", "inputs", "outputs"}
LAYER_FIELDS = {  # that a layer of a kind must have
    "linear": _WEIGHTS,
    "convolution": _WEIGHTS,
    "relu": set[str](),
    "flatten": set[str](),
    "patches": _WEIGHTS | {"patch", "grid", "threshold", "contrast"},
    "projections": _WEIGHTS | {"threshold"},
}


class LayerSection(_Strict):
    kind: Literal["linear", "convolution", "relu", "flatten", "patches", "projections"]
    name: str | None = Field(None, pattern=r"^\w+$", max_length=100)
    inputs: Size | None = None
    outputs: Size | None = None
    patch: int | None = Field(None, ge=1, le=2**10)
    grid: int | None = Field(None, ge=1, le=2**10)
    threshold: float | None = Field(None, ge=0, le=4)
    contrast: float | None = Field(None, gt=0)
    mirror: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = LAYER_FIELDS[self.kind]
        given = {name for name, value in self if value is not None} - {"kind"}
        if not needed <= given:
            raise ValueError(f"a layer of kind '{self.kind}' needs {', '.join(sorted(needed - given))}")
        if more := given - needed - ({"mirror"} if self.kind == "patches" else set()):
            raise ValueError(f"a layer of kind '{self.kind}' has no {', '.join(sorted(more))}")
        return self


Layers = Annotated[tuple[LayerSection, ...], Field(max_length=LAYERS)]


class NamedSection(_Strict):
    """A model that whoever opens the bundle has registered under this name. The name is never imported."""

    name: str = Field(pattern=r"^[\w.:+-]+$", max_length=200)
    options: Annotated[dict[str, Any], _bounded(WIDTH, vocabulary=VOCABULARY)] = Field(default_factory=dict)


# Which of the two it is tells a table from a list; the tags are no part of a field's name (`read.py`).
ModelSection = Annotated[
    Annotated[Layers, Tag("<layers>")] | Annotated[NamedSection, Tag("<named>")],
    Discriminator(lambda given: "<named>" if isinstance(given, dict | NamedSection) else "<layers>"),
]


class ArchitectureSection(_Strict):
    layers: ModelSection
    adaptation_width: int | None = Field(None, ge=1, le=WIDTH)


class TrainingSection(_Strict):
    name: Name
    clients: int = Field(ge=1, le=10**9)
    round: Number = Field(description="rounds behind the published state")
    hyper: TrainingHyper


class Manifest(_Strict):
    """What every bundle says of itself."""

    schema_version: Literal[1] = 1
    kind: str
    made_with: Text
    task: TaskSection
    model: ModelSection
    architectures: dict[Name, ArchitectureSection] = Field(
        {}, max_length=LAYERS, description="by name, where clients differ in theirs"
    )
    training: TrainingSection

    def files(self) -> list[str]:
        """The files that it consists of, but for the checksums."""
        return [MANIFEST, WEIGHTS, CARD]

    def to_json(self) -> str:
        text = self.model_dump_json(indent=2, exclude_none=True)
        # What is flat goes on one line. A line break in JSON is never part of a string.
        return re.sub(r"[\[{]\n[^\[\]{}]*[\]}]", lambda flat: re.sub(r"\n *", " ", flat[0]), text) + "\n"


class FederationManifest(Manifest):
    kind: Literal["federation"] = "federation"
    personalizers: dict[Name, PersonalizerHyper] = Field(min_length=1, max_length=PERSONALIZERS)
    default: Name
    fitted: tuple[Annotated[str, Field(pattern=r"^[\w.+-]+$", max_length=300)], ...] = Field(
        max_length=10 * PERSONALIZERS, description="what was fitted after training, over the same clients"
    )
    members: Number = Field(0, description="training clients whose own layers are in the bundle")
    public: Number = Field(0, description="unlabelled samples that everyone has")
    summary: dict[str, Any] = Field(description="of the training, for people")

    def files(self) -> list[str]:
        return [*super().files(), *(member_file(i) for i in range(self.members))]


class PersonalManifest(Manifest):
    model_config = ConfigDict(allow_inf_nan=True)  # a diary says what it saw

    kind: Literal["personal"] = "personal"
    personalizer: Name
    hyper: PersonalizerHyper
    architecture: Annotated[str, Field(max_length=200), AfterValidator(_readable)] = ""
    samples: int = Field(ge=1, lt=2**40, description="without labels, that it was personalized on")
    diary: Diary
    models: Size = Field(1, description="parameter sets; of several, the mean of the logits counts")
    checked: tuple[Literal["inputs", "features", "edges"], ...] = Field(
        (), max_length=3, description="in which spaces later data can be compared with the federation's"
    )
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="logits are divided by it")


def member_file(client: int) -> str:
    return f"members/{client}.safetensors"


def version() -> str:
    from upfl import __version__  # here, because the package imports this module

    return f"upfl {__version__}"
