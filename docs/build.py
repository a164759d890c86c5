"""The documentation site: `python -m docs.build` makes `site/`, which opens from the file, without a network.

Its pages are those of docs/, what `generate.py` makes from the program, results/, and the documents of the repository's
root. Links between them are written as the repository has them, and turned into the site's; a link to a file that is no
page becomes its name. Zensical warns of links that lead nowhere, and a warning ends the build; `check` looks at the
finished pages again, for what they would load from elsewhere, too.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import tomli_w

from docs import generate
from upfl.rows import ROWS

ROOT = Path(__file__).parents[1]
WORK = ".site"  # what Zensical reads
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PICTURES = (".png", ".svg", ".css", ".js")
SHIM = "https://unpkg.com/iframe-worker/shim"  # what Zensical's pages load to search without a server


def sources() -> dict[Path, str]:
    """The repository's documents, with their places in the site."""
    found = {path: path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))}
    found |= {path: f"results/{path.name}" for path in sorted((ROOT / "results").glob("*.md"))}
    return found | {ROOT / name: f"project/{name.lower()}" for name in PROJECT}


def build(out: Path, work: Path = ROOT / WORK) -> None:
    shutil.rmtree(work, ignore_errors=True)
    pages = work / "pages"
    placed = sources()
    for source, place in placed.items():
        _write(pages / place, relinked(source, place, placed))
    for folder in ("docs", "results"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in PICTURES:
                (pages / _inside(path)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, pages / _inside(path))
    made = generate.pages()
    for place, text in made.items():
        _write(pages / place, text)
    settings = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    project |= {"docs_dir": "pages", "site_dir": "site"}
    project["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    for section in project["nav"]:
        if "Methods" in section:
            rows = [{row.title: f"methods/{generate.stem(row.row)}.md"} for row in ROWS]
            section["Methods"] = ["methods/index.md", *rows]
    _write(work / "zensical.toml", tomli_w.dumps(settings))
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [zensical, "build", "--clean", "--strict"], cwd=work, text=True, capture_output=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Traceback" not in line]
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines)) + "\nthe site was not built")
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(work / "site", out)
    shutil.rmtree(work)
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        here = os.path.relpath(out / "assets" / "worker.js", page.parent)
        page.write_text(text.replace(SHIM, here), encoding="utf-8")


def relinked(source: Path, place: str, placed: dict[Path, str]) -> str:
    """A document's text, with links as the site has them."""

    def turned(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            return match[0]
        meant = Path(os.path.normpath(source.parent / unquote(parts.path)))
        if meant in placed:
            link = os.path.relpath(placed[meant], Path(place).parent)
            return f"{text}({link}{f'#{parts.fragment}' if parts.fragment else ''})"
        if meant == ROOT / "results":
            return f"{text}({os.path.relpath('results/README.md', Path(place).parent)})"
        if meant.suffix in PICTURES and meant.exists():
            return f"{text}({os.path.relpath(_inside(meant), Path(place).parent)})"
        made = os.path.normpath(Path(place).parent / parts.path)
        if made in MADE:
            return match[0]
        if not meant.exists():
            sys.exit(f"{source}: a link to {target}, which is not there")
        return f"{text[1:-1]}"  # a file of the repository, not of the site

    parts = re.split(r"(```.*?```)", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    plain = [part if part.startswith("```") else re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", turned, part) for part in parts]
    return "".join(plain)


MADE = frozenset(generate.pages())


def _inside(path: Path) -> Path:
    """Where a picture of docs/ or of results/ is in the site."""
    return path.relative_to(ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# The finished pages


class _Page(HTMLParser):
    """What a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attributes if value}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loads += [given[key] for key in ("href", "src") if key in given and given.get("rel") != "canonical"]


def check(site: Path) -> list[str]:
    """What is wrong with the finished pages: links that lead nowhere, and what they would load from elsewhere."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong = [] if pages else [f"{site}: there are no pages"]
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        for target in (*page.links, *page.loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads:
                    wrong.append(f"{path.relative_to(site.resolve())}: loads {target} from elsewhere")
                continue
            meant = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not meant.exists():
                wrong.append(f"{path.relative_to(site.resolve())}: {target} is not there")
            elif anchor and meant in pages and anchor not in pages[meant].anchors and not anchor.startswith("__"):
                wrong.append(f"{path.relative_to(site.resolve())}: {target}: no such place in that page")
    for path in site.rglob("*.css"):
        for loaded in re.findall(r"url\((https?:[^)]*)\)|@import", path.read_text(encoding="utf-8")):
            wrong.append(f"{path.relative_to(site)}: loads {loaded} from elsewhere")
    return wrong


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    build(target)
    problems = check(target)
    print(
        "\n".join(problems)
        or f"{len(list(target.rglob('*.html')))} pages, every link leads somewhere: {target / 'index.html'}"
    )
    sys.exit(bool(problems))
