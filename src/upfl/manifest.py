"""What a bundle says of itself: the schema of `manifest.json`, checked field by field."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from upfl.contract import Diary
from upfl.data.inputs import InputFormat

SCHEMA = 1
MANIFEST, WEIGHTS, CARD, SUMS = "manifest.json", "weights.safetensors", "README.md", "SHA256SUMS"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")


class TaskSection(_Strict):
    name: str
    classes: tuple[str, ...] = Field(min_length=1)
    input: InputFormat

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("two classes have the same name")
        return self


class LayerSection(_Strict):
    kind: Literal["linear", "convolution", "relu", "flatten", "patches"]
    name: str | None = Field(None, pattern=r"^\w+$")
    inputs: int | None = Field(None, ge=1)
    outputs: int | None = Field(None, ge=1)
    patch: int | None = Field(None, ge=1, le=2**10)
    grid: int | None = Field(None, ge=1, le=2**10)
    threshold: float | None = Field(None, ge=0, le=4)
    contrast: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = {self.name is not None, self.inputs is not None, self.outputs is not None}
        if given != {self.kind in ("linear", "convolution", "patches")}:
            raise ValueError("name, inputs and outputs belong to layers with parameters, all three of them")
        if {value is not None for value in (self.patch, self.grid, self.threshold, self.contrast)} != {
            self.kind == "patches"
        }:
            raise ValueError("patch, grid, threshold and contrast belong to patches, all four of them")
        return self


class ArchitectureSection(_Strict):
    layers: tuple[LayerSection, ...]
    adaptation_width: int | None = Field(None, ge=1)


class TrainingSection(_Strict):
    name: str
    clients: int = Field(ge=1)
    round: int = Field(ge=0, description="rounds behind the published state")
    hyper: dict[str, Any]


class Manifest(_Strict):
    """What every bundle says of itself."""

    schema_version: Literal[1] = 1
    kind: str
    made_with: str
    task: TaskSection
    model: tuple[LayerSection, ...]
    architectures: dict[str, ArchitectureSection] = Field({}, description="by name, where clients differ in theirs")
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
    personalizers: dict[str, dict[str, Any]] = Field(min_length=1)
    default: str
    fitted: tuple[str, ...] = Field(description="what was fitted after training, over the same clients")
    members: int = Field(0, ge=0, description="training clients whose own layers are in the bundle")
    public: int = Field(0, ge=0, le=2**32, description="unlabelled samples that everyone has")
    summary: dict[str, Any] = Field(description="of the training, for people")

    def files(self) -> list[str]:
        return [*super().files(), *(member_file(i) for i in range(self.members))]


class PersonalManifest(Manifest):
    model_config = ConfigDict(allow_inf_nan=True)  # a diary says what it saw

    kind: Literal["personal"] = "personal"
    personalizer: str
    hyper: dict[str, Any]
    architecture: str = ""
    samples: int = Field(ge=1, description="without labels, that it was personalized on")
    diary: Diary
    models: int = Field(1, ge=1, description="parameter sets; of several, the mean of the logits counts")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="logits are divided by it")


def member_file(client: int) -> str:
    return f"members/{client}.safetensors"
