// A view whose code is asked for when it is first shown.
import type { ComponentType } from "preact";
import { useLoad } from "./hooks";
import { Failure, Loading } from "./parts";

/** The component that `load` brings, once it is there; until then it says that it loads, or why it cannot. */
export function later<P extends object>(what: string, load: () => Promise<ComponentType<P>>): ComponentType<P> {
  let code: Promise<ComponentType<P>> | undefined;
  let View: ComponentType<P> | undefined;
  const ask = () => (code ??= load().catch((error: unknown) => ((code = undefined), Promise.reject(error))));
  return function Later(properties: P) {
    const { error } = useLoad(async () => void (View = await ask()), []);
    if (View) return <View {...properties} />;
    return error ? <Failure error={error} what={what} /> : <Loading what={what} />;
  };
}
