// An answer token by token: the paler, the surer; each with what else it might have been.
import { useState } from "preact/hooks";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // probabilities that part the shades

function level(logprob) {
  const p = Math.exp(logprob);
  const found = LEVELS.findIndex((limit) => p >= limit);
  return found < 0 ? LEVELS.length : found;
}

function visible(text) {
  return text.replaceAll("\n", "↵\n");
}

export function Tokens({ tokens }) {
  const [chosen, setChosen] = useState(null);
  const token = tokens[chosen];
  const step = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = event.currentTarget.children[(chosen ?? 0) + (move ?? 0)];
    if (move && next) {
      event.preventDefault();
      next.focus();
    }
  };
  return (
    <div class="tokens">
      <p class="legend muted">
        Probability: {["≥ 90 %", "60", "30", "10", "less"].map((name, i) => (
          <span key={i} class={`token p${i}`}>{name}</span>
        ))}
      </p>
      <div class="token-text" role="group" aria-label="Tokens; arrow keys move" onKeyDown={step}
        onMouseLeave={() => setChosen(null)}>
        {tokens.map((each, i) => (
          <span key={i} class={`token p${level(each.logprob)}`} tabIndex={i === (chosen ?? 0) ? 0 : -1}
            aria-describedby={i === chosen ? "alternatives" : undefined}
            onMouseEnter={() => setChosen(i)} onFocus={() => setChosen(i)}>
            {visible(each.token)}
          </span>
        ))}
      </div>
      <div class="alternatives" id="alternatives" aria-live="polite">
        {token ? <Alternatives token={token} /> : <p class="muted">Point at a token, or move to it with the keyboard.</p>}
      </div>
    </div>
  );
}

function Alternatives({ token }) {
  const listed = token.top_logprobs.some((each) => each.token === token.token)
    ? token.top_logprobs
    : [token, ...token.top_logprobs];
  return (
    <ol>
      {listed.map((each, i) => (
        <li key={i} class={each.token === token.token ? "taken" : ""}>
          <code>{JSON.stringify(each.token)}</code>
          <meter min="0" max="1" value={Math.exp(each.logprob)} aria-label="probability" />
          <span>{(Math.exp(each.logprob) * 100).toFixed(1)} %</span>
          <span class="muted">{each.logprob.toFixed(3)}</span>
        </li>
      ))}
    </ol>
  );
}
