// Hooks that several views share.
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";
import { ReadError } from "../data/client";
import { runStore, type RunStore } from "../data/store";
import { parse, type Route } from "../route";

export interface Loaded<T> {
  value: T | null;
  error: ReadError | Error | null;
  loading: boolean;
}

/** What `load` gives, asked for again when one of `keys` changes; the earlier value stays until then unless `forget`. */
export function useLoad<T>(load: (signal: AbortSignal) => Promise<T>, keys: unknown[], forget = true): Loaded<T> {
  const [state, setState] = useState<Loaded<T>>({ value: null, error: null, loading: true });
  useLayoutEffect(() => {
    // Before anything is painted: the request need not wait for a frame.
    const ended = new AbortController();
    setState((before) => ({ value: forget ? null : before.value, error: null, loading: true }));
    load(ended.signal).then(
      (value) => !ended.signal.aborted && setState({ value, error: null, loading: false }),
      (error: Error) => !ended.signal.aborted && setState((before) => ({ value: before.value, error, loading: false })),
    );
    return () => ended.abort();
  }, keys);
  return state;
}

/** The run's store; the component is drawn again whenever it changes. */
export function useRun(run: string): RunStore {
  const store = runStore(run);
  const [, redraw] = useReducer((n: number) => n + 1, 0);
  useLayoutEffect(() => store.watch(() => redraw(0)), [store]); // what changes after the drawing is not missed
  return store;
}

/** The width of an element in CSS pixels, followed. */
export function useWidth<E extends HTMLElement>(): [{ current: E | null }, number] {
  const ref = useRef<E>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const observer = new ResizeObserver((entries) => setWidth(Math.floor(entries[0]?.contentRect.width ?? 0)));
    observer.observe(element);
    setWidth(Math.floor(element.clientWidth));
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

export function useTitle(...parts: (string | number)[]): void {
  const title = [...parts, "Relax Gym"].join(" · ");
  useEffect(() => {
    document.title = title;
  }, [title]);
}

/** What the address asks for, followed. */
export function useRoute(): Route {
  const [drawn] = useState(location.hash);
  const [route, setRoute] = useState(() => parse(drawn));
  useLayoutEffect(() => {
    // Before anything is painted: who sees the page can change the address.
    const changed = () => setRoute(parse(location.hash));
    if (location.hash !== drawn) changed(); // by a part of the page that was drawn before
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}
