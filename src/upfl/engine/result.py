"""What a result and a line of metrics must have, so that whoever shows them need not look again."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Percent = Annotated[float, Field(ge=-1, le=100)]


class Part(BaseModel):
    """What somebody takes from a file of a run folder; fields that it does not know are for others."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Client(Part):
    client: int = Field(ge=0)
    kind: Literal["training", "new"]
    accuracy: Percent
    size: int = Field(ge=0)
    architecture: str = ""


class _Architecture(Part):
    clients: int = Field(ge=0)
    validation: Percent | None
    test_before: Percent | None
    test: Percent | None


class _Row(Part):
    row: str = Field(max_length=300)
    # What a federation of other people's machines cannot know is not there.
    validation: Percent = 0
    test: Percent = 0
    test_before: Percent = 0
    test_last: Percent = 0
    test_best: Percent = 0
    best_round: int = Field(ge=0)
    clients: tuple[_Client, ...]
    architectures: dict[str, _Architecture] = {}

    @model_validator(mode="after")
    def _before_and_after(self) -> Self:
        if ("test" in self.model_fields_set) != ("test_before" in self.model_fields_set):
            raise ValueError("test and test_before belong together")
        if self.architectures and not all(client.architecture for client in self.clients):
            raise ValueError("a client has no architecture")
        return self


class _Result(Part):
    seed: int
    partition_seed: int
    rounds: int = Field(ge=0)
    left_out: int = Field(ge=0)
    notes: tuple[str, ...] = ()
    rows: tuple[_Row, ...]


class _Round(Part):
    round: int = Field(ge=0)
    bytes_up: float = 0
    bytes_down: float = 0


def checked_result(result: Any) -> dict[str, Any]:
    """A result as it was stored, if all is there that is shown of it; ValueError else."""
    if not isinstance(result, dict) or "rows" not in result:
        raise ValueError("there are no rows")
    _check(_Result, result)
    return result


def checked_round(line: Any) -> dict[str, Any]:
    _check(_Round, line)
    checked: dict[str, Any] = line
    return checked


def _check(kind: type[BaseModel], value: Any) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}") from None
