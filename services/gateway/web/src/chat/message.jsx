// One message of a conversation: its text or its tokens, what may be done with it, its figures.
import { useState } from "preact/hooks";
import { count, rate, seconds } from "../format.js";
import { Icon } from "../icons.jsx";
import { CopyButton, Markdown } from "./markdown.jsx";
import { Tokens } from "./tokens.jsx";

export function Message({ message, live, busy, onAgain, onEdit }) {
  const [editing, setEditing] = useState(false);
  if (message.role === "user") {
    return (
      <article class="message user" aria-label="You">
        {editing ? (
          <Editor text={message.content} cancel={() => setEditing(false)}
            done={(text) => { setEditing(false); onEdit(text); }} />
        ) : (
          <>
            <div class="said">{message.content}</div>
            <div class="tools">
              <button type="button" class="quiet" disabled={busy} onClick={() => setEditing(true)}>
                <Icon name="edit" /> Edit
              </button>
              <CopyButton text={message.content} />
            </div>
          </>
        )}
      </article>
    );
  }
  return (
    <article class="message assistant" aria-label="Model" aria-busy={live}>
      {message.reasoning && (
        <details class="reasoning" open={live && !message.content}>
          <summary>Reasoning</summary>
          <p>{message.reasoning}</p>
        </details>
      )}
      <Body message={message} live={live} />
      {message.error && <p class="failure" role="alert">{message.error}</p>}
      {!live && (
        <div class="tools">
          <Figures message={message} />
          <button type="button" class="quiet" disabled={busy} onClick={onAgain}>
            <Icon name="again" /> Again
          </button>
          <CopyButton text={message.content} />
        </div>
      )}
    </article>
  );
}

function Body({ message, live }) {
  const [asText, setAsText] = useState(false);
  if (live && !message.content && !message.reasoning) {
    return <p class="waiting" aria-label="Waiting for the first token"><i /><i /><i /></p>;
  }
  if (!message.tokens) return <Markdown text={message.content} />;
  return (
    <>
      <div class="switch" role="group" aria-label="How to show the answer">
        <button type="button" aria-pressed={!asText} onClick={() => setAsText(false)}>Tokens</button>
        <button type="button" aria-pressed={asText} onClick={() => setAsText(true)}>Text</button>
      </div>
      {asText ? <Markdown text={message.content} /> : <Tokens tokens={message.tokens} />}
    </>
  );
}

function Figures({ message }) {
  const { stats = {} } = message;
  const usage = stats.usage;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  return (
    <dl class="figures">
      {stats.ttft !== undefined && <div><dt>TTFT</dt><dd>{seconds(stats.ttft)}</dd></div>}
      {stats.rate !== undefined && <div><dt>tokens/s</dt><dd>{rate(stats.rate)}</dd></div>}
      {usage && <div><dt>in</dt><dd>{count(usage.prompt_tokens)}{cached > 0 && ` (${count(cached)} cached)`}</dd></div>}
      {usage && <div><dt>out</dt><dd>{count(usage.completion_tokens)}</dd></div>}
      {stats.finish && stats.finish !== "stop" && <div><dt>end</dt><dd>{stats.finish}</dd></div>}
      {message.requestId && (
        <div><dd><a href={`#/requests/named/${message.requestId}`}>journey</a></dd></div>
      )}
    </dl>
  );
}

function Editor({ text, cancel, done }) {
  const [value, setValue] = useState(text);
  return (
    <form class="editor" onSubmit={(event) => { event.preventDefault(); if (value.trim()) done(value); }}>
      <label class="hidden" for="edited">Edit the message</label>
      <textarea id="edited" value={value} rows={3} ref={(element) => element?.focus()}
        onInput={(event) => setValue(event.target.value)}
        onKeyDown={(event) => event.key === "Escape" && cancel()} />
      <div class="actions">
        <button type="button" onClick={cancel}>Cancel</button>
        <button type="submit" class="primary">Send</button>
      </div>
    </form>
  );
}
