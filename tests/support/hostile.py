"""Texts that try to be more than text, for every field, label and name that a page shows."""

# Each sets this mark if it is ever run.
_RUN = "window.pwned=(window.pwned||[]).concat('{name}')"
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
HOSTILE = {name: text.format(run=_RUN.format(name=name)) for name, text in _ATTEMPTS.items()}
HOSTILE["long"] = "A" * 1_000_000
HOSTILE["long markup"] = "<b>" * 300_000
