"""Texts that attack the page they are shown on, and what a page that holds has nothing of."""

# Each sets this mark if it is ever run.
RUN = "window.pwned=(window.pwned||[]).concat('{name}')"
_ATTEMPTS = {
    "script": "<script>{run}</script>",
    "closing": "</script><script>{run}</script>",
    "title": "</title></style></noscript></textarea></pre><script>{run}</script>",
    "comment": "--><script>{run}</script><!--",
    "cdata": "]]><script>{run}</script>",
    "image": '<img src=x onerror="{run}">',
    "vector": '<svg onload="{run}"><animate onbegin="{run}" attributeName=x dur=1s>',
    "double quote": '" onmouseover="{run}" autofocus tabindex=1 onfocus="{run}" x="',
    "single quote": "' onmouseover='{run}' autofocus onfocus='{run}' x='",
    "link": '<a href="javascript:{run}">here</a>',
    "frame": '<iframe srcdoc="<script>parent.{run}</script>" src="javascript:parent.{run}"></iframe>',
    "remote": '<img src="http://example.com/a.png"><link rel=stylesheet href="//example.com/a.css">',
    "refresh": '<meta http-equiv=refresh content="0;url=http://example.com">',
    "base": '<base href="http://example.com/"><form action=x><button autofocus>send</button></form>',
    "style": "</style><style>body{{display:none}}</style>",
    "template": "{{{{7*7}}}} ${{7*7}} <%= 7*7 %> #{{7*7}} {{% raw %}}",
    "entity": "&lt;script&gt;&#60;b&#62;&amp;",
    "separators": "'\u2028{run}\u2029'",
    "bidi": "\u202egpj.exe\u202c \u2066isolated\u2069 \u200f",
    "terminal": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \x08\x7f",
    "nul": "a\0b\x00",
    "surrogates": "\ud800 lone \udfff\udc00 \ud83d",
    "smuggled": "plain\U000e0068\U000e0069 \U000e0100 a\u200bb \u2060",
    "pile": "Z" + "\u0301\u0489" * 300,
    "tab and line": "a\tb\nc\r\nd",
}
HOSTILE = {name: text.format(run=RUN.format(name=name)) for name, text in _ATTEMPTS.items()}
HOSTILE["long"] = "A" * 1_000_000
HOSTILE["long markup"] = "<b>" * 300_000

# Everything that could run or load something, and is not the page's own.
FOREIGN = """
(() => {
  const all = [...document.querySelectorAll("*")];
  const handlers = all.filter((one) => [...one.attributes].some((a) => /^on/.test(a.name)));
  const elements = document.querySelectorAll(
    `iframe, object, embed, img, form, button, input, base, audio, video, animate, meta[http-equiv=refresh],
     body b, body i, body u, svg a, a:not([href^="#section-"]), link:not([href="data:,"]), [autofocus]`);
  const scripts = [...document.scripts].filter((one) => one.type != "application/json").length;
  return [handlers.length, elements.length, scripts, document.styleSheets[0].ownerNode.parentNode.tagName];
})()
"""
# What a reader might do to a page, to everything on it.
POKE = """
for (const one of document.querySelectorAll("*"))
  for (const kind of ["mouseover", "mousemove", "pointerover", "click", "focus", "mouseout"])
    one.dispatchEvent(new MouseEvent(kind, { bubbles: kind != "focus", clientX: 200, clientY: 200 }));
"""
