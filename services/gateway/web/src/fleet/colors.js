// The stylesheet's colours, for what is drawn on a canvas; read again when the theme changes.
import { useEffect, useState } from "preact/hooks";

const NAMES = ["ink", "muted", "line", "prefill", "decode", "bubble", "accent", "surface"];

function read() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export function useColors() {
  const [colors, setColors] = useState(read);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const refresh = () => setColors(read());
    dark.addEventListener("change", refresh);
    addEventListener("themechange", refresh);
    return () => {
      dark.removeEventListener("change", refresh);
      removeEventListener("themechange", refresh);
    };
  }, []);
  return colors;
}
