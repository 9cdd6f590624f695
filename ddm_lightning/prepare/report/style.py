"""How the page looks, in light and in dark, on wide and on narrow screens."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --pale: #5c6470; --paper: #ffffff; --page: #f4f5f7;
  --line: #dfe3e8; --accent: #2c64c6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --pale: #a0a8b4; --paper: #1b1e23;
  --page: #121417; --line: #343a43; --accent: #6fa0f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 75rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; }
section > h3, .card > h3 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 48rem; }
header p { max-width: none; }
a { color: var(--accent); }
.pale, figcaption, footer { color: var(--pale); font-size: .875rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem;
  margin: 0 0 1rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.pair > * { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; max-width: 40rem; height: auto; margin: 0 auto; }
figcaption { margin-top: .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--pale); font-weight: 600; font-size: .8125rem; }
tbody th { font-weight: 500; }
.facts tbody th { min-width: 9.5rem; }
.pair + p { margin-top: .75rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.together { white-space: nowrap; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(3.5rem, 1fr)); gap: .25rem;
  margin: .75rem 0; }
.pictures img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: .25rem;
  background: #ffffff; }
.captions { margin: .25rem 0 0; padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .35rem; }
.captions li { border: 1px solid var(--line); border-radius: .25rem; padding: .05rem .45rem; font-size: .8125rem;
  max-width: 100%; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
@media (max-width: 32rem) { .card { padding: .75rem; } table { font-size: .875rem; }
  th, td { padding-right: .45rem; } thead th { font-size: .75rem; } th:last-child, td:last-child { padding-right: 0; } }
footer { margin-top: 2rem; }
"""
