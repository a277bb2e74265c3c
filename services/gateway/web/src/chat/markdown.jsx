// Markdown as elements of the page. The text is read into tokens and each token becomes an
// element with text in it: no string is ever turned into markup, so a model's HTML is shown
// as the text that it is. Links go to http, https and mailto alone; images are links.
import { createLowlight } from "lowlight";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { Lexer } from "marked";
import { memo } from "preact/compat";
import { useState } from "preact/hooks";
import { Icon } from "../icons.jsx";

const lowlight = createLowlight({
  bash, cpp, go, java, javascript, json, python, rust, sql, xml, yaml,
});
lowlight.registerAlias({ bash: ["sh", "shell", "console"], javascript: ["js", "ts", "typescript"],
  python: ["py"], cpp: ["c", "c++"], xml: ["html"], yaml: ["yml"] });

const MAX_HIGHLIGHTED = 20_000; // characters

export const Markdown = memo(function Markdown({ text }) {
  return <div class="prose">{blocks(new Lexer({ gfm: true }).lex(text))}</div>;
});

function blocks(tokens) {
  return tokens.map((token, i) => <Block key={i} token={token} />);
}

function Block({ token }) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      const Level = `h${Math.min(token.depth + 1, 6)}`; // the first is the page's
      return <Level>{inline(token.tokens)}</Level>;
    }
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "code":
      return <Code text={token.text} language={token.lang ?? ""} />;
    case "blockquote":
      return <blockquote>{blocks(token.tokens)}</blockquote>;
    case "list":
      return <List token={token} />;
    case "hr":
      return <hr />;
    case "table":
      return <Table token={token} />;
    case "text":
      return token.tokens ? <>{inline(token.tokens)}</> : <>{token.text}</>;
    default: // HTML too
      return <p>{token.raw}</p>;
  }
}

function List({ token }) {
  const items = token.items.map((item, i) => (
    <li key={i}>
      {item.task && <input type="checkbox" checked={item.checked} disabled aria-label="task" />}
      {blocks(item.tokens)}
    </li>
  ));
  return token.ordered ? <ol start={token.start || 1}>{items}</ol> : <ul>{items}</ul>;
}

function Table({ token }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>{token.header.map((cell, i) => <th key={i}>{inline(cell.tokens)}</th>)}</tr>
        </thead>
        <tbody>
          {token.rows.map((row, i) => (
            <tr key={i}>{row.map((cell, j) => <td key={j}>{inline(cell.tokens)}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inline(tokens = []) {
  return tokens.map((token, i) => {
    switch (token.type) {
      case "strong":
        return <strong key={i}>{inline(token.tokens)}</strong>;
      case "em":
        return <em key={i}>{inline(token.tokens)}</em>;
      case "del":
        return <del key={i}>{inline(token.tokens)}</del>;
      case "codespan":
        return <code key={i}>{token.text}</code>;
      case "br":
        return <br key={i} />;
      case "link":
      case "image":
        return <Link key={i} href={token.href}>{token.tokens ? inline(token.tokens) : token.text}</Link>;
      case "text":
        return token.tokens ? inline(token.tokens) : token.text;
      case "escape":
        return token.text;
      default:
        return token.raw;
    }
  });
}

function Link({ href, children }) {
  if (!/^(https?:|mailto:)/i.test(href)) return <span>{children}</span>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer">
      {children}
    </a>
  );
}

function Code({ text, language }) {
  const name = language.split(/\s/)[0].toLowerCase();
  const known = lowlight.registered(name) && text.length <= MAX_HIGHLIGHTED;
  return (
    <figure class="code">
      <figcaption>
        <span>{name || "code"}</span>
        <CopyButton text={text} />
      </figcaption>
      <pre tabIndex={0}>
        <code>{known ? highlighted(lowlight.highlight(name, text).children) : text}</code>
      </pre>
    </figure>
  );
}

function highlighted(nodes) {
  return nodes.map((node, i) =>
    node.type === "text" ? (
      node.value
    ) : (
      <span key={i} class={node.properties.className.join(" ")}>
        {highlighted(node.children)}
      </span>
    ),
  );
}

export function CopyButton({ text, label = "Copy" }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button type="button" class="quiet" onClick={copy}>
      <Icon name="copy" />
      <span aria-live="polite">{copied ? "Copied" : label}</span>
    </button>
  );
}

/** The clipboard, also on plain HTTP, where pages have no access to it. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
