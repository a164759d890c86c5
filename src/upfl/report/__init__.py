"""Figures and tables, made from run folders alone.

collect.py   the run folders, and what was left out and why
lines.py     settings, rows, seeds
tables.py    tables, as data; rendering.py writes them as HTML, Markdown, LaTeX, CSV
figures.py   figures
page.py      all of it as one page
"""
