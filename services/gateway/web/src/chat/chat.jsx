// Chat: conversations, the open one, and how the next answer is sampled.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { getJson } from "../api.js";
import { Icon } from "../icons.jsx";
import { useStore } from "../store.js";
import { answer } from "./answer.js";
import { conversations, forget, keep, newConversation, settings, unsaved } from "./conversations.js";
import { Message } from "./message.jsx";
import { SettingsPanel } from "./settings.jsx";

const IDEAS = [
  "Explain what a KV cache is, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Make a table of three oceans and their mean depth.",
];

export function Chat() {
  const [open, setOpen] = useState(() => conversations.value[0] ?? newConversation());
  const [panel, setPanel] = useState(""); // "history" or "settings", where they do not fit
  const [running, setRunning] = useState(null); // the AbortController of the answer that comes
  const [models, setModels] = useState([]);
  const log = useRef();
  const isSaved = !useStore(unsaved);

  useEffect(() => {
    getJson("/v1/models").then(
      ({ data }) => setModels(data.map(({ id }) => id)),
      () => setModels([]),
    );
  }, []);
  useEffect(() => () => running?.abort(), [running]);
  useStick(log, open);

  const show = useCallback(
    (conversation) => {
      running?.abort();
      setOpen(conversation);
      setPanel("");
    },
    [running],
  );

  /** Asks for an answer to some messages, which become the conversation. */
  const ask = async (messages) => {
    const reply = { role: "assistant", content: "" };
    const conversation = { ...open, messages: [...messages, reply] };
    const abort = new AbortController();
    setRunning(abort);
    setOpen(conversation);
    const draw = onceAFrame(() => setOpen({ ...conversation, messages: [...messages, { ...reply }] }));
    await answer(messages, settings.value, reply, draw, abort.signal);
    const done = { ...conversation, messages: [...messages, { ...reply }] };
    keep(done);
    setOpen((shown) => (shown.id === done.id ? done : shown));
    setRunning((current) => (current === abort ? null : current));
  };

  return (
    <div class="chat" data-panel={panel}>
      <History open={open} show={show} />
      <section class="talk" aria-label="Conversation">
        <div class="talk-bar">
          <button type="button" class="icon only-narrow" aria-label="Conversations"
            aria-expanded={panel === "history"}
            onClick={() => setPanel(panel === "history" ? "" : "history")}>
            <Icon name="list" />
          </button>
          <ModelPicker models={models} />
          <button type="button" class="icon" aria-label="New conversation" title="New conversation"
            onClick={() => show(newConversation())}>
            <Icon name="plus" />
          </button>
          <button type="button" class="icon only-medium" aria-label="Settings"
            aria-expanded={panel === "settings"}
            onClick={() => setPanel(panel === "settings" ? "" : "settings")}>
            <Icon name="gear" />
          </button>
        </div>
        <div class="log" ref={log} role="log" aria-label="Messages" tabIndex={0}>
          {open.messages.length > 0 && <h1 class="hidden">{open.title || "Conversation"}</h1>}
          {open.messages.length === 0 && <Welcome ask={(text) => ask([{ role: "user", content: text }])} />}
          {open.messages.map((message, i) => (
            <Message key={`${open.id}-${i}`} message={message}
              live={running !== null && i === open.messages.length - 1}
              busy={running !== null}
              onAgain={() => ask(open.messages.slice(0, i))}
              onEdit={(text) => ask([...open.messages.slice(0, i), { role: "user", content: text }])}
            />
          ))}
        </div>
        {!isSaved && <p class="notice">This browser keeps no more conversations: its storage is full or forbidden.</p>}
        <Composer running={running}
          send={(text) => ask([...open.messages.filter(({ error }) => !error), { role: "user", content: text }])} />
      </section>
      <SettingsPanel close={() => setPanel("")} />
    </div>
  );
}

/** Calls something at the next frame, however often it is asked to before. */
function onceAFrame(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  };
}

/** Keeps the end of the log in sight, unless its reader has scrolled away from it. */
function useStick(log, open) {
  const stuck = useRef(true);
  useEffect(() => {
    const element = log.current;
    const onScroll = () => {
      stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
    };
    element.addEventListener("scroll", onScroll, { passive: true });
    return () => element.removeEventListener("scroll", onScroll);
  }, []);
  useEffect(() => {
    stuck.current = true;
  }, [open.id]);
  useEffect(() => {
    if (stuck.current) log.current.scrollTop = log.current.scrollHeight;
  }, [open]);
}

function History({ open, show }) {
  const list = useStore(conversations);
  return (
    <aside class="history" aria-label="Conversations">
      <button type="button" class="wide" onClick={() => show(newConversation())}>
        <Icon name="plus" /> New conversation
      </button>
      <ul>
        {list.map((conversation) => (
          <li key={conversation.id}>
            <button type="button" class="pick" aria-current={conversation.id === open.id || undefined}
              onClick={() => show(conversation)}>
              {conversation.title}
            </button>
            <button type="button" class="icon" aria-label={`Delete “${conversation.title}”`}
              onClick={() => {
                forget(conversation.id);
                if (conversation.id === open.id) show(newConversation());
              }}>
              <Icon name="trash" />
            </button>
          </li>
        ))}
      </ul>
      <p class="muted">Kept in this browser alone.</p>
    </aside>
  );
}

function ModelPicker({ models }) {
  const { model } = useStore(settings);
  const chosen = models.includes(model) ? model : (models[0] ?? "");
  useEffect(() => {
    if (chosen !== settings.value.model) settings.set({ ...settings.value, model: chosen });
  }, [chosen]);
  return (
    <label class="model">
      <span class="hidden">Model</span>
      <select value={chosen} disabled={models.length === 0}
        onChange={(event) => settings.set({ ...settings.value, model: event.target.value })}>
        {models.length === 0 && <option value="">no model</option>}
        {models.map((name) => <option key={name} value={name}>{name}</option>)}
      </select>
    </label>
  );
}

function Welcome({ ask }) {
  return (
    <div class="welcome">
      <img src="/web/icon.svg" alt="" width="56" height="56" />
      <h1>Ask the fleet something</h1>
      <p class="muted">Your conversations stay in this browser.</p>
      <div class="ideas">
        {IDEAS.map((idea) => (
          <button type="button" key={idea} onClick={() => ask(idea)}>{idea}</button>
        ))}
      </div>
    </div>
  );
}

function Composer({ running, send }) {
  const [text, setText] = useState("");
  const input = useRef();
  useEffect(() => {
    const element = input.current;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 220)}px`;
  }, [text]);
  const submit = () => {
    if (running || !text.trim()) return;
    send(text);
    setText("");
  };
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <label class="hidden" for="prompt">Message</label>
      <textarea id="prompt" ref={input} rows={1} value={text} placeholder="Message the model"
        onInput={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            submit();
          }
        }} />
      {running ? (
        <button type="button" class="primary round" aria-label="Stop" title="Stop" onClick={() => running.abort()}>
          <Icon name="stop" />
        </button>
      ) : (
        <button type="submit" class="primary round" aria-label="Send" title="Send" disabled={!text.trim()}>
          <Icon name="send" />
        </button>
      )}
    </form>
  );
}
