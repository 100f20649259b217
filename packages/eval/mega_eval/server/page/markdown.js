"use strict";
// Markdown as DOM nodes. Text becomes text nodes only, so an answer cannot add HTML, scripts or styles to the page.
const Markdown = (() => {
  const make = (tag, ...children) => {
    const node = document.createElement(tag);
    node.append(...children);
    return node;
  };
  const LINK = /^(https?:|mailto:)/i;
  const RULES = [
    [/^\\([\\`*_{}[\]()#+\-.!|~<>])/, (found) => found[1]],
    [/^(`+)([\s\S]*?[^`])\1(?!`)/, (found) => make("code", found[2].replace(/^ (.*[^ ].*) $/, "$1"))],
    [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (found, depth) => make("strong", ...inline(found[1], depth))],
    [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (found, depth) => make("strong", ...inline(found[1], depth))],
    [/^~~(?=\S)([\s\S]*?\S)~~/, (found, depth) => make("del", ...inline(found[1], depth))],
    [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (found, depth) => make("em", ...inline(found[1], depth))],
    [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (found, depth) => make("em", ...inline(found[1], depth))],
    [/^\[([^\]\n]{1,500})\]\(([^)\s]{1,2000})\)/, (found, depth) => link(found[2], inline(found[1], depth)) || found[0]],
    [/^https?:\/\/[^\s<>"')\]]{1,2000}[^\s<>"')\].,;:!?]/, (found) => link(found[0], [found[0]])],
    [/^<br ?\/?>/, () => make("br")],
  ];

  function link(address, children) {
    if (!LINK.test(address)) return null;
    const node = make("a", ...children);
    node.href = address;
    node.rel = "noopener noreferrer";
    node.target = "_blank";
    return node;
  }

  function inline(text, depth = 0) {
    if (depth > 6) return [text];
    const nodes = [];
    let plain = "";
    while (text) {
      const found = /^[\\`*_~[h<]/.test(text) && firstRule(text, plain, depth);
      if (found) {
        if (plain) nodes.push(plain);
        plain = "";
        nodes.push(found[1]);
        text = text.slice(found[0]);
      } else {
        const next = text.slice(1).search(/[\\`*_~[<]|https?:/);
        const size = next < 0 ? text.length : next + 1;
        plain += text.slice(0, size);
        text = text.slice(size);
      }
    }
    if (plain) nodes.push(plain);
    return nodes;
  }

  function firstRule(text, before, depth) {
    if (text[0] === "_" && /\w$/.test(before)) return null; // as in snake_case
    for (const [pattern, build] of RULES) {
      const found = pattern.exec(text.slice(0, 4000));
      if (found) return [found[0].length, build(found, depth + 1)];
    }
    return null;
  }

  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*).*$/, ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
  const HEAD = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/, RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/, ROW = /^\s*\|?.*\|.*$/;
  const DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

  function cells(row) {
    return row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  }

  function blocks(lines, depth) {
    const nodes = [];
    let at = 0;
    const starts = (line) => FENCE.test(line) || HEAD.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
    while (at < lines.length) {
      const line = lines[at];
      let found;
      if (!line.trim()) at++;
      else if ((found = FENCE.exec(line))) {
        const end = lines.findIndex((other, index) => index > at && other.trim().startsWith(found[1]) && !other.trim().slice(found[1].length).trim());
        nodes.push(fenced(lines.slice(at + 1, end < 0 ? lines.length : end).join("\n"), found[2]));
        at = end < 0 ? lines.length : end + 1;
      } else if ((found = HEAD.exec(line))) {
        nodes.push(make(`h${Math.min(4, found[1].length)}`, ...inline(found[2])));
        at++;
      } else if (RULE.test(line)) {
        nodes.push(make("hr"));
        at++;
      } else if (/^ {0,3}>/.test(line) && depth < 6) {
        const own = [];
        while (at < lines.length && /^ {0,3}>/.test(lines[at])) own.push(lines[at++].replace(/^ {0,3}> ?/, ""));
        nodes.push(make("blockquote", ...blocks(own, depth + 1)));
      } else if (ITEM.test(line) && depth < 6) {
        at = list(lines, at, depth, nodes);
      } else if (ROW.test(line) && at + 1 < lines.length && DASHES.test(lines[at + 1]) && lines[at + 1].includes("-")) {
        const head = make("tr", ...cells(line).map((cell) => make("th", ...inline(cell))));
        const rows = [];
        for (at += 2; at < lines.length && lines[at].trim() && ROW.test(lines[at]); at++)
          rows.push(make("tr", ...cells(lines[at]).map((cell) => make("td", ...inline(cell)))));
        nodes.push(make("table", make("thead", head), make("tbody", ...rows)));
      } else {
        const own = [line];
        while (++at < lines.length && lines[at].trim() && !starts(lines[at])) own.push(lines[at]);
        nodes.push(make("p", ...inline(own.join("\n"))));
      }
    }
    return nodes;
  }

  function list(lines, at, depth, nodes) {
    const first = ITEM.exec(lines[at]), indent = first[1].length, ordered = /\d/.test(first[2]);
    const node = make(ordered ? "ol" : "ul");
    if (ordered) node.start = parseInt(first[2], 10);
    while (at < lines.length) {
      const found = ITEM.exec(lines[at]);
      if (!found || found[1].length > indent + 1 || found[1].length < indent || /\d/.test(found[2]) !== ordered) break;
      const own = [lines[at].slice(found[0].length)], width = found[0].length;
      while (++at < lines.length) {
        const next = lines[at], spaces = next.search(/\S/);
        const inside = spaces > indent + 1 || (spaces < 0 && /^\s/.test(lines[at + 1] || ""));
        const lazy = spaces >= 0 && !ITEM.test(next) && !FENCE.test(next) && lines[at - 1].trim();
        if (!inside && !lazy) break;
        own.push(next.slice(Math.min(width, Math.max(spaces, 0))));
      }
      const content = blocks(own, depth + 1);
      node.append(make("li", ...(content.length && content[0].tagName === "P" ? [...content[0].childNodes, ...content.slice(1)] : content)));
      while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] || "")) at++;
    }
    nodes.push(node);
    return at;
  }

  function fenced(text, language) {
    const copy = make("button", "Copy");
    copy.type = "button";
    copy.className = "copy";
    copy.onclick = () => navigator.clipboard && navigator.clipboard.writeText(text);
    const code = make("code", text);
    if (language) code.dataset.language = language;
    return make("pre", copy, code);
  }

  return { render: (text) => blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0) };
})();
