// The page's icons, drawn on 20 x 20.
const PATHS = {
  chat: "M3 4h14v9H9l-4 3v-3H3z",
  fleet: "M3 4h14v4H3zM3 12h14v4H3zM6 6h.01M6 14h.01",
  requests: "M3 5h6M6 10h8M10 15h7",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  moon: "M16 12.5A6.8 6.8 0 0 1 7.5 4a6.8 6.8 0 1 0 8.5 8.5z",
  auto: "M10 3a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM10 3v14M10 6h4.5M10 10h6.5M10 14h4.5",
  plus: "M10 4v12M4 10h12",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  gear: "M4 6h7M15 6h1M4 14h1M9 14h7M13 4.2v3.6M7 12.2v3.6",
  list: "M4 5h12M4 10h12M4 15h12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  again: "M15.5 8A6 6 0 1 0 16 11M16 4v4h-4",
  edit: "M4 16l1-4 8.5-8.5 3 3L8 15z",
  copy: "M7 7h9v9H7zM4 13V4h9",
  close: "M5 5l10 10M15 5L5 15",
  back: "M12 4l-6 6 6 6",
};

export function Icon({ name }) {
  return (
    <svg class={`glyph glyph-${name}`} viewBox="0 0 20 20" width="18" height="18" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
