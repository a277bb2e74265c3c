// How answers are sampled, and what the model is told first.
import { Icon } from "../icons.jsx";
import { useStore } from "../store.js";
import { DEFAULTS, changeSettings, settings } from "./conversations.js";

const SLIDERS = [
  { name: "temperature", label: "Temperature", max: 2, step: 0.05, hint: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05, hint: "the likeliest tokens that add up to this" },
  { name: "top_k", label: "Top k", max: 200, step: 1, hint: "0 is off" },
  { name: "min_p", label: "Min p", max: 1, step: 0.01, hint: "part of the likeliest token's probability" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, hint: "1 is off" },
];

export function SettingsPanel({ close }) {
  const values = useStore(settings);
  return (
    <aside class="settings" aria-label="Settings">
      <div class="settings-bar">
        <h2>Settings</h2>
        <button type="button" class="icon only-medium" aria-label="Close settings" onClick={close}>
          <Icon name="close" />
        </button>
      </div>
      <label for="system">System prompt</label>
      <textarea id="system" rows={4} value={values.system} placeholder="You are a helpful assistant."
        onInput={(event) => changeSettings({ system: event.target.value })} />
      <label class="check">
        <input type="checkbox" checked={values.tokens}
          onChange={(event) => changeSettings({ tokens: event.target.checked })} />
        Show tokens and log-probabilities
      </label>
      <Field name="max_tokens" label="Max tokens" hint="empty: the rest of the context" values={values} />
      {SLIDERS.map((slider) => <Slider key={slider.name} {...slider} value={values[slider.name]} />)}
      <Field name="seed" label="Seed" hint="empty: another one each time" values={values} />
      <label for="stop">Stop strings</label>
      <textarea id="stop" rows={2} value={values.stop} placeholder="one a line; \n is a line's end"
        onInput={(event) => changeSettings({ stop: event.target.value })} />
      <button type="button" class="wide"
        onClick={() => changeSettings({ ...DEFAULTS, model: values.model })}>
        Back to the defaults
      </button>
    </aside>
  );
}

function Slider({ name, label, hint, min = 0, max, step, value }) {
  return (
    <div class="slider">
      <label for={name}>{label}</label>
      <output for={name}>{value}</output>
      <input id={name} type="range" min={min} max={max} step={step} value={value}
        aria-describedby={hint ? `${name}-hint` : undefined}
        onInput={(event) => changeSettings({ [name]: Number(event.target.value) })} />
      {hint && <small id={`${name}-hint`} class="muted">{hint}</small>}
    </div>
  );
}

function Field({ name, label, hint, values }) {
  return (
    <div class="field">
      <label for={name}>{label}</label>
      <input id={name} type="number" inputmode="numeric" value={values[name]} placeholder={hint}
        onInput={(event) => changeSettings({ [name]: event.target.value })} />
    </div>
  );
}
