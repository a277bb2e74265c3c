// The page: its frame, its routes, its theme, and the dialog for an API key.
import "uplot/dist/uPlot.min.css";
import "./app.css";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { apiKey, onKeyNeeded, setApiKey } from "./api.js";
import { Chat } from "./chat/chat.jsx";
import { Fleet } from "./fleet/fleet.jsx";
import { Icon } from "./icons.jsx";
import { Journey, Requests } from "./requests/requests.jsx";
import { load, save } from "./store.js";

const VIEWS = [
  { name: "chat", label: "Chat", icon: "chat" },
  { name: "fleet", label: "Fleet", icon: "fleet" },
  { name: "requests", label: "Requests", icon: "requests" },
];

function useRoute() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const onChange = () => setRoute(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  const known = VIEWS.some((view) => view.name === route[0]);
  return known ? route : ["chat"];
}

function useTheme() {
  const [theme, setTheme] = useState(() => load("shoal.theme", "auto"));
  useEffect(() => {
    save("shoal.theme", theme);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  return [theme, setTheme];
}

const NEXT_THEME = { auto: "light", light: "dark", dark: "auto" };

function App() {
  const route = useRoute();
  const [theme, setTheme] = useTheme();
  const main = useRef();
  const view = VIEWS.find(({ name }) => name === route[0]);
  useEffect(() => {
    document.title = `${view.label} · Shoal`;
  }, [view]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => skipTo(event, main)}>
        Skip to content
      </a>
      <header class="bar">
        <a class="brand" href="#/fleet">
          <img src="/web/icon.svg" alt="" width="28" height="28" />
          <span>Shoal</span>
        </a>
        <nav aria-label="Views">
          {VIEWS.map(({ name, label, icon }) => (
            <a key={name} href={`#/${name}`} aria-current={name === view.name ? "page" : undefined}>
              <Icon name={icon} />
              {label}
            </a>
          ))}
        </nav>
        <button
          type="button"
          class="icon"
          onClick={() => setTheme(NEXT_THEME[theme])}
          aria-label={`Theme: ${theme}. Change it`}
          title={`Theme: ${theme}`}
        >
          <Icon name={{ auto: "auto", light: "sun", dark: "moon" }[theme]} />
        </button>
      </header>
      <main id="main" ref={main} tabIndex={-1} class={`view-${view.name}`}>
        {view.name === "chat" && <Chat />}
        {view.name === "fleet" && <Fleet />}
        {view.name === "requests" &&
          (route[1] ? <Journey id={route[1]} name={route[2]} /> : <Requests />)}
      </main>
      <KeyDialog />
    </>
  );
}

function skipTo(event, main) {
  event.preventDefault(); // the hash is the route
  main.current.focus();
}

/** Asks for an API key when the gateway wants one; one dialog for all who wait for it. */
function KeyDialog() {
  const dialog = useRef();
  const input = useRef();
  const waiting = useRef([]);
  const [message, setMessage] = useState("");
  useEffect(() => {
    onKeyNeeded((triedKey) => {
      if (apiKey() !== triedKey) return Promise.resolve(apiKey()); // somebody has asked already
      setMessage(`This gateway ${triedKey ? "does not know that key" : "asks for an API key"}.`);
      if (!dialog.current.open) dialog.current.showModal();
      return new Promise((resolve) => waiting.current.push(resolve));
    });
  }, []);
  const answer = (key) => {
    if (key) setApiKey(key);
    for (const resolve of waiting.current.splice(0)) resolve(key);
    dialog.current.close();
    input.current.value = "";
  };
  return (
    <dialog ref={dialog} aria-labelledby="key-title" onCancel={() => answer(null)}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          answer(input.current.value.trim() || null);
        }}
      >
        <h2 id="key-title">API key</h2>
        <p>{message}</p>
        <label for="key">Key</label>
        <input id="key" ref={input} type="password" autocomplete="off" required />
        <p class="muted">It is kept in this tab alone, until you close it.</p>
        <div class="actions">
          <button type="button" onClick={() => answer(null)}>
            Cancel
          </button>
          <button type="submit" class="primary">
            Use key
          </button>
        </div>
      </form>
    </dialog>
  );
}

render(<App />, document.getElementById("app"));
