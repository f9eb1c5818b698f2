"""GET /docs: the OpenAPI document as one page of HTML, without scripts and without anything from elsewhere."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from html import escape
from typing import Any

from aiohttp import web

from jaxserve.http.openapi import document
from jaxserve.http.operation import operation
from jaxserve.http.state import SERVER

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.85em/1.5 ui-monospace, monospace; }
pre { padding: 0.7rem; overflow-x: auto; border: 1px solid #8885; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.7rem 0.25rem 0; border-top: 1px solid #8885; }
summary { cursor: pointer; padding: 0.4rem 0; }
section { border-top: 2px solid #8888; margin-top: 2rem; }
.needed::after { content: " needed"; color: #c33; font-size: 0.8em; }
"""
CSP = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[\da-fA-F:.]+\](:\d+)?", re.ASCII)
_LIMITS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}",
           "minItems": "at least {} items", "maxItems": "at most {} items", "maxProperties": "at most {} entries",
           "minLength": "at least {} characters", "maxLength": "at most {} characters"}  # fmt: skip


@operation(reply=str, content_type="text/html")
async def docs(request: web.Request) -> web.Response:
    """This API as a page to read."""
    host = request.headers.get("Host", "")
    url = f"{request.scheme}://{host if _HOST.fullmatch(host) else 'localhost:8000'}"
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    headers = {"Content-Security-Policy": CSP.format(digest), "X-Content-Type-Options": "nosniff",
               "Cache-Control": "no-store"}  # fmt: skip
    page = "".join(_page(document(request.app), url, request.app[SERVER].model_names[0]))
    return web.Response(text=page, content_type="text/html", headers=headers)


def _page(doc: dict[str, Any], url: str, model: str) -> Iterator[str]:
    info = doc["info"]
    yield '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(info['title'])}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    yield f"<p>Model: {_code(model)}. Machine-readable: <a href='openapi.json'>openapi.json</a>.</p>"
    for paragraph in info["description"].strip().split("\n\n"):
        yield f"<p>{re.sub('`(.+?)`', r'<code>\1</code>', escape(paragraph))}</p>"
    if "security" in doc:
        yield f"<p>Calls need a key: {_code('Authorization: Bearer KEY')}.</p>"
    yield "<ul>"
    routes = [(method, path, each) for path, methods in doc["paths"].items() for method, each in methods.items()]
    for method, path, each in routes:
        link = escape(each["operationId"])
        yield f'<li><a href="#{link}">{_code(f"{method.upper()} {path}")}</a> {escape(each["summary"])}</li>'
    yield "</ul>"
    for method, path, each in routes:
        yield from _route(doc, url, method, path, each)
    yield "</body></html>"


def _route(doc: dict[str, Any], url: str, method: str, path: str, each: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(each["operationId"])}"><h2>{_code(f"{method.upper()} {path}")}</h2>'
    yield f"<p>{escape(each['summary'])}</p>"
    content = each.get("requestBody", {}).get("content", {}).get("application/json", {})
    keyed = "security" in doc and each.get("security") != []
    for call in _calls(url + path, method, each, content, keyed):
        yield f"<pre>{escape(call)}</pre>"
    if each["parameters"]:
        yield from _table("In the URL", {p["name"]: p["schema"] for p in each["parameters"]}, ())
    for ref in content.get("schema", {}).get("anyOf", [content["schema"]] if content else []):
        yield from _body(_named(doc, ref))
    yield "<details><summary>Answers</summary><table><tr><th>status</th><th>body</th><th></th></tr>"
    for status, answer in each["responses"].items():
        response = answer if "$ref" not in answer else doc["components"]["responses"][answer["$ref"].split("/")[-1]]
        bodies = "<br>".join(f"{escape(kind)}: {_code(_type(of['schema']))}"
                             for kind, of in response.get("content", {}).items())  # fmt: skip
        yield f"<tr><td>{status}</td><td>{bodies}</td><td>{escape(response['description'])}</td></tr>"
    yield "</table></details></section>"


def _body(schema: dict[str, Any]) -> Iterator[str]:
    fields, required = schema["properties"], schema["required"]
    refused = {name: field for name, field in fields.items() if set(field) == {"enum"}}
    yield from _table("Fields", {name: fields[name] for name in fields if name not in refused}, required)
    if refused:
        yield "<details><summary>Known fields that are not supported: accepted with these values, or null</summary><p>"
        yield "; ".join(f"{_code(name)} {escape(_type(field))}" for name, field in refused.items())
        yield "</p></details>"
    if rules := schema.get("allOf"):
        yield f"<p>Of the fields: {escape('; '.join(rule['description'] for rule in rules))}.</p>"


def _table(title: str, fields: dict[str, dict[str, Any]], required: list[str] | tuple) -> Iterator[str]:
    yield f"<details><summary>{escape(title)}</summary><table>"
    yield "<tr><th>name</th><th>type and limits</th><th>default</th><th></th></tr>"
    for name, field in fields.items():
        mark = ' class="needed"' if name in required else ""
        default = "" if field.get("default") is None else _code(_json(field["default"]))
        yield f"<tr><td{mark}>{_code(name)}</td><td>{escape(_type(field))}</td><td>{default}</td>"
        yield f"<td>{escape(field.get('description', ''))}</td></tr>"
    yield "</table></details>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in words; null is not named, since every field may be null."""
    if "$ref" in schema:
        return schema["$ref"].split("/")[-1]
    if "enum" in schema:
        return " | ".join(_json(value) for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        return " | ".join(_type(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "data" in schema.get("properties", {}):
        return f"events of {_type(schema['properties']['data']['anyOf'][0]['contentSchema'])}"
    kinds = schema.get("type", "any")
    text = " | ".join(kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null") or "null"
    if "items" in schema:
        text += f" of {_type(schema['items'])}"
    limits = [form.format(schema[key]) for key, form in _LIMITS.items() if key in schema]
    return f"{text} ({', '.join(limits)})" if limits else text


def _calls(url: str, method: str, each: dict[str, Any], content: dict[str, Any], keyed: bool) -> Iterator[str]:
    """curl, and once more with a stream where there is one."""
    verb = "" if method == "get" or content else f" -X {method.upper()}"
    begin = f"curl{verb} {shlex.quote(url)}"
    if keyed:
        begin += ' \\\n  -H "Authorization: Bearer $JAXSERVE_API_KEY"'
    if not content:
        yield begin
        return
    for body in content["examples"].values():
        yield _with_body(begin, body["value"])
    if "text/event-stream" in each["responses"]["200"].get("content", {}):
        yield _with_body(begin.replace("curl", "curl -N", 1), body["value"] | {"stream": True})


def _with_body(begin: str, body: Any) -> str:
    return f"{begin} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(_json(body))}"


def _named(doc: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
    return doc["components"]["schemas"][ref["$ref"].split("/")[-1]]


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
