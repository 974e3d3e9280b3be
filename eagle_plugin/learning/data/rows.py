"""Token rows: a prompt and the answer of the target as token ids. Features are extracted from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from eagle_plugin.common.errors import UserError, json_fault
from eagle_plugin.common.json_files import first_fault

Split = Literal["train", "val"]
TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]
# Bytes of a line; a longer one is not read into memory. A prompt of this length would have about 16 million tokens.
LONGEST_LINE = 64 << 20
MIN_RESPONSE = 2  # tokens: a head reads one of the response and predicts the next


class DataError(UserError):
    """A data file, or a setting of a data command, that cannot be used."""


@dataclass(frozen=True)
class TokenRow:
    """One assistant turn: everything before it, and the turn with its stop token.

    Only response tokens are trained on (mask 0 for prompt_ids, 1 for response_ids).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str  # see `turn_id`
    source: str  # where the prompt came from: "sharegpt", "capture", ...; evaluation reports its results by source
    prompt_ids: TokenIds
    response_ids: TokenIds
    finish: str  # "stop" or "length"; "recorded" if the text was not generated for this row, and was not cut
    split: Split = "train"
    temperature: float | None = None  # of the generation; None for recorded text


_ROW = TypeAdapter(TokenRow)


def turn_id(prompt_id: str, turn: int) -> str:
    """The row id of assistant turn number `turn` (from 0) of a prompt."""
    return f"{prompt_id}#{turn}"


def prompt_id_of(row_id: str) -> str:
    """The id of the prompt that a row was made from."""
    prompt, mark, turn = row_id.rpartition("#")
    return prompt if mark and turn.isdigit() else row_id


def are_ids(value: Any) -> bool:
    """Whether a JSON value is a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def read_rows(path: str | Path) -> Iterator[TokenRow]:
    """Yield the rows of a JSON-lines file.

    A last line without its newline, which a killed writer leaves, is ignored.

    Raises:
        DataError: naming file, line and field.
    """
    path = Path(path)
    with open_lines(path, "the rows that `eagle-plugin data generate` or `render` wrote") as file:
        for number, line in read_lines(file, str(path)):
            if not line.endswith(b"\n"):
                return
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def open_lines(path: Path, wanted: str) -> IO[bytes]:
    """The file, open for reading.

    Raises:
        DataError: it is missing, not a regular file, or not readable; `wanted` says what to give.
    """
    try:
        if path.is_file():
            return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give {wanted}") from error
    raise DataError(f"{path} is not a file; give {wanted}")


def read_lines(stream: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file; memory holds one line of at most `LONGEST_LINE` bytes.

    Raises:
        DataError: a line is longer, or the file cannot be read on.
    """
    number = 1
    try:
        while line := stream.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise long_line(f"{name}:{number}")
            yield number, line
            number += 1
    except OSError as error:
        raise DataError(f"{name}:{number} cannot be read ({error.strerror or error}); copy the file again") from error


def long_line(where: str) -> DataError:
    """The refusal of a line that is longer than `LONGEST_LINE`."""
    return DataError(f"{where} is longer than {LONGEST_LINE >> 20} MiB, wanted one record per line; split that line")


def _parse(line: bytes, where: str) -> TokenRow:
    try:
        return _ROW.validate_python(json.loads(line))
    except RecursionError as error:
        raise DataError(f"{where} {json_fault(error)} to be a token row; remove that line") from error
    except ValidationError as error:
        raise DataError(
            f"{where} is not a token row ({first_fault(error)}); wanted {', '.join(TokenRow.__annotations__)}: "
            "correct the row, or generate it again"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{where} is not a token row ({error}); wanted {', '.join(TokenRow.__annotations__)}"
        ) from error


def format_row(row: TokenRow) -> str:
    """The row as one line of JSON, with its newline."""
    return json.dumps(asdict(row), separators=(",", ":")) + "\n"
