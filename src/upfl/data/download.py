"""Fetching published files: http(s) only, with a progress bar, a size and a checksum."""

import hashlib
import http.client
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection
from pathlib import Path
from shutil import copyfileobj
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from upfl.data.catalog import Download
from upfl.errors import DataError
from upfl.safe.limits import exceeded, limit

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30


def download(downloads: Collection[Download], members: Collection[str], folder: Path) -> None:
    """Fetch all of `downloads` into `folder`; from archives take the files called `members` and nothing else."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        for item in downloads:
            target = folder / urlsplit(item.urls[0]).path.rpartition("/")[2]
            _fetch(item, target, progress)
            if target.name.endswith(".tar.gz"):
                _unpack(target, members)
                target.unlink()


def _fetch(item: Download, target: Path, progress: Progress) -> None:
    """Take the first mirror that delivers exactly the published bytes."""
    problems = []
    for url in item.urls:
        task = progress.add_task(target.name, total=item.size)
        try:
            return _transfer(item, url, target, progress, task)
        except (OSError, ValueError, http.client.HTTPException) as error:
            problems.append(f"{url}: {error}")
            progress.remove_task(task)
    raise DataError("the download failed (" + "; ".join(problems) + ")")


def _transfer(item: Download, url: str, target: Path, progress: Progress, task: int) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    with _opener().open(url, timeout=_TIMEOUT_SECONDS) as answer, target.open("wb") as file:
        # One byte beyond the published size is enough to know that it is another file: an endless one ends here.
        while chunk := answer.read(min(_CHUNK, item.size + 1 - size)):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            progress.update(task, completed=size)  # type: ignore[arg-type]
    if size != item.size:
        raise ValueError(f"{size if size <= item.size else f'more than {item.size}'} bytes came instead of {item.size}")
    if digest.hexdigest() != item.md5:
        raise ValueError(f"its md5 is {digest.hexdigest()} instead of {item.md5}")


def _opener() -> urllib.request.OpenerDirector:
    """Unlike urlopen's, this one knows neither file: nor ftp:, whatever a redirection says."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _unpack(archive: Path, members: Collection[str]) -> None:
    """Names in the archive are only compared, never used as paths. It is unpacked no further than the limit allows."""
    missing = set(members)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                if (end := entry.offset_data + entry.size) > limit("UNPACKED"):  # declared: nothing of it is read yet
                    raise DataError(f"{archive.name} is not unpacked: {exceeded('UNPACKED', end)}")
                name = entry.name.rpartition("/")[2]
                if entry.isfile() and name in missing and (content := tar.extractfile(entry)) is not None:
                    with (archive.parent / name).open("wb") as file:
                        copyfileobj(content, file)
                    missing.remove(name)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{archive.name} cannot be unpacked ({error})") from error
    if missing:
        raise DataError(f"{archive.name} does not hold {', '.join(sorted(missing))}")
