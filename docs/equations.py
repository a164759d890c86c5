# ruff: noqa: RUF001 - Greek letters and signs are what this file is about
"""Docstrings as pages: the equations that stand in them in plain text, set as MathML for browsers.

Equations are the indented blocks of a docstring, in the paper's symbols:

    psi_i <- psi_i - lr * clip(grad CE(f(X; psi_i), Y))       tau local steps from psi_i = psi

becomes a row with psi as a Greek letter, i below it, and what stands three spaces apart as a remark beside it.
"""

import re
from html import escape

GREEK = {
    "psi": "ψ",
    "phi": "φ",
    "lambda": "λ",
    "mu": "μ",
    "sigma": "σ",
    "eps": "ε",
    "alpha": "α",
    "theta": "θ",
    "tau": "τ",
    "pi": "π",
}
SIGNS = {"sum": "∑", "grad": "∇", "<-": "←", ">=": "≥", "<=": "≤", "!=": "≠", "||": "‖", "*": "·", "-": "−"}
UPRIGHT = {"CE", "KL", "softmax", "log", "exp", "argmax", "sqrt", "sign", "mean", "cov", "diag", "tr", "clip"}
UPRIGHT |= {"digamma", "lgamma", "softplus", "Dirichlet", "logits", "projection"}
PROSE = re.compile(r"[A-Za-z]{3,}|of|in|by|on|to|at|is|as|it|or|up|so|an|if|be|no|we|do")
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<sign><-|>=|<=|!=|\|\|)"
    r"|(?P<option>(?!(?:grad|sum|mean)_)[a-z]{2,}_[a-z]{2,}\b|lr\b|cmi\b|l2r\b)|(?P<word>[A-Za-z]+(?:\.(?=[)\s]|$)|[~'])*)|(?P<other>.)"
)


def page_of(docstring: str) -> str:
    """A docstring as Markdown."""
    parts = re.split(r"\n\n", docstring.strip())
    return "\n\n".join(_block(part) if part.startswith("    ") else _paragraph(part) for part in parts) + "\n"


def _paragraph(text: str) -> str:
    """Lines of prose; lines that are indented within a paragraph stand under it."""
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if place and line.startswith("    ")), len(lines))
    prose = "\n".join(re.sub(r"<(?=[A-Za-z|])", "&lt;", line) for line in lines[:first])
    return prose if first == len(lines) else f"{prose}\n\n{_block(chr(10).join(lines[first:]))}"


def _block(text: str) -> str:
    lines = [line[4:] for line in text.splitlines()]
    if sum(bool(re.search(r" (<-|=|~|proportional to) |[-+*/^] ?\w", line)) for line in lines) * 2 < len(lines):
        return "\n".join(f"    {line}" for line in lines)  # a list in columns, not equations
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("   ") and rows:  # goes on with the line above
            rows[-1][-1] += " " + line.strip()
        else:
            rows.append(re.split(r"\s{3,}", line.rstrip()))
    cells = ("".join(_cell(cell) for cell in row) for row in rows)
    return '<div class="equations">\n' + "\n".join(f"<p>{row}</p>" for row in cells) + "\n</div>"


def _cell(text: str) -> str:
    """An equation, or words beside one; words before a colon name what follows."""
    named = re.match(r"([A-Za-z][\w +(),`'-]*?(?:: +|  +))(?=\S)(?!<-|=|~)(?=.*(?:<-|=|~))", text)
    label = f"<span>{escape(named[1].strip())}</span> " if named else ""
    rest = text[named.end() :] if named else text
    words = re.findall(r"[A-Za-z]{2,}", rest)
    prose = [word for word in words if PROSE.fullmatch(word) and word not in UPRIGHT | GREEK.keys() | SIGNS.keys()]
    if not re.search(r"<-|=|~|\^|proportional to|\b\w_\w", rest) or (len(prose) > 4 and "=" not in rest):
        return f"{label}<span>{escape(rest)}</span> "
    return label + mathml(rest) + " "


def mathml(text: str) -> str:
    """One equation."""
    text = text.replace("proportional to", "∝").replace("+-", "±")
    tokens = [(match.lastgroup or "other", match[0]) for match in TOKEN.finditer(text)]
    return f"<math>{''.join(_row(tokens))}</math>"


def _row(tokens: list[tuple[str, str]]) -> list[str]:
    made: list[str] = []
    place = 0
    while place < len(tokens):
        atom, place = _atom(tokens, place)
        below = above = ""
        while place < len(tokens) and tokens[place][1] in ("_", "^") and atom:
            mark = tokens[place][1]
            script, place = _script(tokens, place + 1)
            below, above = (script, above) if mark == "_" else (below, script)
        if below and above:
            made.append(f"<msubsup>{atom}{below}{above}</msubsup>")
        elif below or above:
            kind = "msub" if below else "msup"
            made.append(f"<{kind}>{atom}{below or above}</{kind}>")
        elif atom:
            made.append(atom)
    return made


def _script(tokens: list[tuple[str, str]], place: int) -> tuple[str, int]:
    """What stands below or above: a sign and a name or number, with what a slash or a comma ties to it."""
    start = place
    if place < len(tokens) and tokens[place][1] == "(":
        while place < len(tokens) and tokens[place][1] != ")":
            place += 1
        return f"<mrow>{''.join(_row(tokens[start + 1 : place]))}</mrow>", place + 1
    if place < len(tokens) and tokens[place][1] == "-":
        place += 1
    place += 1
    tied = False
    while place + 1 < len(tokens) and tokens[place][1] in ("/", ",") and tokens[place + 1][0] in ("word", "number"):
        place, tied = place + 2, True
    if tied and place + 1 < len(tokens) and tokens[place][1] == "_":  # as in r_i,d_k
        place += 2
    return f"<mrow>{''.join(_row(tokens[start:place]))}</mrow>".replace("&#160;", ""), place


def _atom(tokens: list[tuple[str, str]], place: int) -> tuple[str, int]:
    kind, text = tokens[place]
    before = tokens[place - 1] if place else ("space", " ")
    after = tokens[place + 1] if place + 1 < len(tokens) else ("space", " ")
    if kind == "space":
        return "", place + 1
    if kind == "number":
        return f"<mn>{text}</mn>", place + 1
    if kind == "option":
        return f"<mtext>{text}</mtext>", place + 1
    if kind == "word":
        return _word(text), place + 1
    if text == "<" and after[0] == "word":
        return '<mo stretchy="false">⟨</mo>', place + 1
    if text == ">" and before[0] != "space":
        return '<mo stretchy="false">⟩</mo>', place + 1
    fixed = ' stretchy="false"' if text in "()[]|" or text == "||" else ""
    return f"<mo{fixed}>{escape(SIGNS.get(text, text))}</mo>", place + 1


def _word(text: str) -> str:
    name = text.rstrip("~'.")
    marks = text[len(name) :]
    if name in ("sum", "grad"):
        atom = f"<mo>{SIGNS[name]}</mo>"
    elif name in GREEK:
        atom = f"<mi>{GREEK[name]}</mi>"
    elif name in UPRIGHT:
        atom = f'<mi mathvariant="normal">{name}</mi>'
    elif PROSE.fullmatch(name):
        atom = f"<mtext>&#160;{name}&#160;</mtext>"
    else:
        atom = "".join(f"<mi>{letter}</mi>" for letter in name)
    for mark in marks:
        if mark == "'":
            atom = f'<mrow>{atom}<mo lspace="0" rspace="0">′</mo></mrow>'
        else:
            atom = f'<mover accent="true">{atom}<mo>{"~" if mark == "~" else "˙"}</mo></mover>'
    return atom
